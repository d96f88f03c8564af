// The shared object of a plugin, found as NCCL finds it.
#pragma once

#include <dlfcn.h>

#include <memory>
#include <string>

namespace netapi {

struct CloseLibrary {
  void operator()(void* library) const { ::dlclose(library); }
};
using Library = std::unique_ptr<void, CloseLibrary>;

// `name` is a path, or what NCCL_NET_PLUGIN takes. Null: `error` has what the loader said about `name` itself, or about
// the file that exists and cannot be loaded.
Library open_library(const std::string& name, std::string& error);

// `name` if it is a path, else the file that was found.
std::string path_of(const Library& library, const std::string& name);

}  // namespace netapi
