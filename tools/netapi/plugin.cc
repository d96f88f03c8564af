#include "netapi/plugin.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

// Where libnccl-net-NAME.so is, in the order of the search.
std::vector<std::string> candidates(const std::string& name) {
  if (name.find('/') != std::string::npos) return {name};
  const std::string file = "libnccl-net-" + name + ".so";
  std::vector<std::string> all{name, file};
  std::error_code unreadable;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", unreadable);
  if (unreadable) return all;
  const std::filesystem::path directory = program.parent_path();
  for (const char* place : {VERBATIM_PLUGIN_DIRECTORY, "../../plugin"}) {  // from bindir, from build/tools/PROGRAM
    all.push_back((directory / place / file).lexically_normal().string());
  }
  return all;
}

std::string path_of(const Library& library, const std::string& name) {
  const link_map* map = nullptr;
  if (name.find('/') != std::string::npos || dlinfo(library.get(), RTLD_DI_LINKMAP, &map) != 0) return name;
  return map->l_name;
}

// Null: `error` has what the loader said about `name` itself, or about the file that exists and cannot be loaded.
Library open_library(const std::string& name, std::string& error) {
  for (const std::string& candidate : candidates(name)) {
    Library library(dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL));
    if (library) return library;
    const std::string why = dlerror();
    if (error.empty() || access(candidate.c_str(), F_OK) == 0) error = why;
  }
  if (name.find('/') == std::string::npos) error += "; nor is there a libnccl-net-" + name + ".so";
  return nullptr;
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
