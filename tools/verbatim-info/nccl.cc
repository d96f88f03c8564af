#include "verbatim-info/nccl.h"

#include <dlfcn.h>
#include <link.h>
#include <pwd.h>
#include <strings.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace verbatim::info {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kNewestTable = 12;
constexpr int kOldestTable = 6;

// The newest table of a release of NCCL, by its number (22803 is 2.28.3).
struct Release {
  int number;
  int table;
};
constexpr Release kReleases[] = {{23003, 12}, {22803, 11}, {22602, 10}};

std::string path_of(void* library) {
  link_map* map = nullptr;
  return ::dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr ? map->l_name : "";
}

std::string setting(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

// The file is given as it is, or by the part of its name that differs: "verbatim".
void* open_entry(const std::string& entry) {
  if (void* library = ::dlopen(entry.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  const bool is_file = entry.find('/') != std::string::npos || (entry.starts_with("lib") && entry.ends_with(".so"));
  return is_file ? nullptr : ::dlopen(("libnccl-net-" + entry + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
}

Json plugin_json(const std::string& entry) {
  void* const library = open_entry(entry);
  if (library == nullptr) {
    const char* const error = ::dlerror();
    return {{"entry", entry}, {"error", error != nullptr ? error : "cannot be opened"}};
  }
  Json json = {{"entry", entry}, {"path", path_of(library)}, {"name", nullptr}, {"tables", Json::array()}};
  for (int version = kNewestTable; version >= kOldestTable; --version) {
    // Every table begins with the name.
    const auto* table =
        static_cast<const char* const*>(::dlsym(library, ("ncclNetPlugin_v" + std::to_string(version)).c_str()));
    if (table == nullptr) continue;
    if (json["name"].is_null()) json["name"] = *table;
    json["tables"].push_back(version);
  }
  return json;
}

// Not set: NCCL's default name.
std::vector<std::string> entries(const std::string& plugins) {
  const char* const given = std::getenv("NCCL_NET_PLUGIN");
  if (given == nullptr) return {"libnccl-net.so"};
  if (::strcasecmp(given, "none") == 0) return {};
  std::vector<std::string> list;
  for (std::size_t begin = 0; begin < plugins.size();) {
    const std::size_t end = std::min(plugins.find(',', begin), plugins.size());
    if (end > begin) list.push_back(plugins.substr(begin, end - begin));
    begin = end + 1;
  }
  return list;
}

Json library_json() {
  void* const library = ::dlopen("libnccl.so.2", RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  const auto get_version = reinterpret_cast<int (*)(int*)>(::dlsym(library, "ncclGetVersion"));
  int number = 0;
  if (get_version == nullptr || get_version(&number) != 0) return nullptr;
  Json json = {{"path", path_of(library)},
               {"version", std::to_string(number / 10000) + "." + std::to_string(number / 100 % 100) + "." +
                               std::to_string(number % 100)},
               {"newest_table", nullptr}};
  for (const Release& release : kReleases) {
    if (number < release.number) continue;
    json["newest_table"] = release.table;
    break;
  }
  return json;
}

void read_file(const std::string& path, std::map<std::string, std::string>& file_of) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t equals = line.find('=');
    if (equals == std::string::npos || equals == 0) continue;
    const std::string name = line.substr(0, equals);
    if (std::getenv(name.c_str()) != nullptr) continue;
    ::setenv(name.c_str(), line.c_str() + equals + 1, 0);
    file_of.emplace(name, path);
  }
}

}  // namespace

std::map<std::string, std::string> read_configuration_files() {
  std::map<std::string, std::string> file_of;
  const passwd* const user = ::getpwuid(::getuid());
  if (const std::string given = setting("NCCL_CONF_FILE"); !given.empty()) {
    read_file(given, file_of);
  } else if (user != nullptr && user->pw_dir != nullptr) {
    read_file(std::string(user->pw_dir) + "/.nccl.conf", file_of);
  }
  read_file("/etc/nccl.conf", file_of);
  return file_of;
}

Json nccl_json() {
  const std::string net = setting("NCCL_NET");
  const std::string list = setting("NCCL_NET_PLUGIN");
  Json plugins = Json::array();
  bool is_taken = false;
  bool takes_verbatim = false;
  for (const std::string& entry : entries(list)) {
    Json plugin = plugin_json(entry);
    // NCCL takes the first plugin whose init succeeds, of the name NCCL_NET if that is set.
    const bool has_name = plugin.contains("name") && !plugin["name"].is_null();
    const std::string name = has_name ? plugin["name"].get<std::string>() : "";
    const bool taken = !is_taken && has_name && (net.empty() || ::strcasecmp(net.c_str(), name.c_str()) == 0);
    if (taken) takes_verbatim = name == "Verbatim";
    is_taken = is_taken || taken;
    plugin["taken"] = taken;
    plugins.push_back(std::move(plugin));
  }
  Json json = {{"library", library_json()},
               {"net_plugin", std::getenv("NCCL_NET_PLUGIN") != nullptr ? Json(list) : Json(nullptr)},
               {"net", net.empty() ? Json(nullptr) : Json(net)},
               {"plugins", std::move(plugins)},
               {"takes_verbatim", takes_verbatim}};
  if (is_taken && !takes_verbatim) {
    json["next"] = "name verbatim first in NCCL_NET_PLUGIN, and set NCCL_NET=Verbatim: NCCL takes another plugin";
  } else if (!net.empty() && ::strcasecmp(net.c_str(), "Verbatim") != 0) {
    json["next"] = "set NCCL_NET=Verbatim: now it names another network";
  } else if (!takes_verbatim) {
    json["next"] = "set NCCL_NET_PLUGIN=verbatim, and LD_LIBRARY_PATH to the directory of the plugin";
  } else if (net.empty()) {
    json["next"] = "set NCCL_NET=Verbatim: without it NCCL takes another network where init fails";
  }
  return json;
}

}  // namespace verbatim::info
