#include "verbs/dynamic_library.h"

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

}  // namespace verbatim
