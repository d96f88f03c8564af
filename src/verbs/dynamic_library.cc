#include "verbs/dynamic_library.h"

#include <dlfcn.h>

namespace verbatim {

DynamicLibrary DynamicLibrary::open(std::initializer_list<const char*> names) {
  DynamicLibrary library;
  for (const char* name : names) {
    library.handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library.handle_ != nullptr) {
      library.name_ = name;
      library.load_error_.clear();
      return library;
    }
    const char* reason = dlerror();
    library.load_error_ += (library.load_error_.empty() ? "" : "; ") + std::string(reason != nullptr ? reason : name);
  }
  return library;
}

void* DynamicLibrary::find(const char* symbol, const char* version) const {
  void* address = dlvsym(handle_, symbol, version);
  return address != nullptr ? address : dlsym(handle_, symbol);
}

}  // namespace verbatim
