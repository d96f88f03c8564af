// A library opened at run time, so that a tool builds and starts where it is missing, and says so.
#pragma once

#include <dlfcn.h>

#include <string>

#include "ranks/failure.h"

namespace verbatim::ncclapi {

// Never closed: GPU libraries do not bear it.
class SharedLibrary {
 public:
  explicit SharedLibrary(const std::string& name)
      : name_(name), library_(dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
    if (library_ == nullptr) throw ranks::Failure(std::string("missing here: ") + dlerror());
  }

  template <typename Function>
  void find(const char* symbol, Function*& function) const {
    function = reinterpret_cast<Function*>(dlsym(library_, symbol));
    if (function == nullptr) throw ranks::Failure(name_ + " has no " + symbol);
  }

 private:
  const std::string name_;
  void* const library_;
};

}  // namespace verbatim::ncclapi
