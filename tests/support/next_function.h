// For a test program that defines a function of the C library itself, so that the plugin calls the program's version:
// finds the original function.
#pragma once

#include <dlfcn.h>

#include <string>

namespace verbatim::test {

// A sanitizer has an interceptor for the function, which must see the calls that are forwarded.
template <typename Function>
Function next_function(const char* name) {
  const std::string intercepted = std::string("__interceptor_") + name;
  void* const found = dlsym(RTLD_DEFAULT, intercepted.c_str());
  return reinterpret_cast<Function>(found != nullptr ? found : dlsym(RTLD_NEXT, name));
}

}  // namespace verbatim::test
