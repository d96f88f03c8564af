#include "netapi/library.h"

#include <link.h>
#include <unistd.h>

#include <filesystem>
#include <vector>

namespace netapi {
namespace {

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

}  // namespace

std::string path_of(const Library& library, const std::string& name) {
  const link_map* map = nullptr;
  if (name.find('/') != std::string::npos || dlinfo(library.get(), RTLD_DI_LINKMAP, &map) != 0) return name;
  return map->l_name;
}

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

}  // namespace netapi
