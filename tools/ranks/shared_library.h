// A library that is opened at run time, so that a tool can be built and started where the library is missing. The tool
// reports a missing library only when it is needed.
#pragma once

#include <dlfcn.h>

#include <string>

#include "ranks/failure.h"

namespace verbatim::ranks {

// The library is never closed: GPU libraries do not support being unloaded.
class SharedLibrary {
 public:
  explicit SharedLibrary(const std::string& name)
      : name_(name), library_(dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
    if (library_ == nullptr) throw Failure(std::string("cannot open the library: ") + dlerror());
  }

  template <typename Function>
  void find(const char* symbol, Function*& function) const {
    find_optional(symbol, function);
    if (function == nullptr) throw Failure(name_ + " has no " + symbol);
  }

  // Sets `function` to null when the library does not have the symbol.
  template <typename Function>
  void find_optional(const char* symbol, Function*& function) const {
    function = reinterpret_cast<Function*>(dlsym(library_, symbol));
  }

 private:
  const std::string name_;
  void* const library_;
};

}  // namespace verbatim::ranks
