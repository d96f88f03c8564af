#include "netapi/plugin.h"

#include <dlfcn.h>

#include <string>
#include <string_view>
#include <utility>

#include "netapi/table.h"

namespace netapi {
namespace {

std::string symbol_of(int version) {
  return "ncclNetPlugin_v" + std::to_string(version);
}

template <int kVersion>
std::unique_ptr<Plugin> open_table(Library& library) {
  void* const symbol = dlsym(library.get(), symbol_of(kVersion).c_str());
  if (symbol == nullptr) return nullptr;
  return std::make_unique<Table<kVersion>>(std::move(library), static_cast<const typename Abi<kVersion>::Net*>(symbol));
}

// Opens table version `wanted`, or the newest exported version from kVersion down when `wanted` is 0.
template <int kVersion>
std::unique_ptr<Plugin> open_newest(Library& library, int wanted) {
  if (wanted == 0 || wanted == kVersion) {
    if (auto plugin = open_table<kVersion>(library)) return plugin;
  }
  if constexpr (kVersion > kOldestVersion) {
    return open_newest<kVersion - 1>(library, wanted);
  } else {
    return nullptr;
  }
}

}  // namespace

std::string verbs_name(const Properties& properties) {
  constexpr std::string_view kPrefix = "verbatim_";
  const std::string suffix = "_p" + std::to_string(properties.port);
  std::string name = properties.name;
  if (!name.starts_with(kPrefix)) return name;
  if (properties.port > 1 && name.ends_with(suffix)) name.resize(name.size() - suffix.size());
  return name.substr(kPrefix.size());
}

Opened open_plugin(const std::string& name, int version) {
  if (version != 0 && (version < kOldestVersion || version > kNewestVersion)) {
    return {nullptr, "unknown net plugin version: " + std::to_string(version) + "; known versions: " +
                         std::to_string(kOldestVersion) + " to " + std::to_string(kNewestVersion)};
  }
  std::string error;
  Library library = open_library(name, error);
  if (!library) return {nullptr, error};
  const std::string path = path_of(library, name);
  std::unique_ptr<Plugin> plugin = open_newest<kNewestVersion>(library, version);
  if (plugin) return {std::move(plugin), {}, path};
  const std::string symbol = version == 0
                                 ? "any of " + symbol_of(kOldestVersion) + " to _v" + std::to_string(kNewestVersion)
                                 : symbol_of(version);
  return {nullptr, path + " does not export " + symbol};
}

}  // namespace netapi
