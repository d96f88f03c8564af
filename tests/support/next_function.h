// For a program that defines a function of the C library itself, so that the plugin finds that one first: the function
// that it stands before.
#pragma once

#include <dlfcn.h>

#include <string>

namespace verbatim::test {

// A sanitizer has its own in between, which must see what is real.
template <typename Function>
Function next_function(const char* name) {
  const std::string intercepted = std::string("__interceptor_") + name;
  void* const found = dlsym(RTLD_DEFAULT, intercepted.c_str());
  return reinterpret_cast<Function>(found != nullptr ? found : dlsym(RTLD_NEXT, name));
}

}  // namespace verbatim::test
