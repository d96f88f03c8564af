// A shared library that is opened at run time and never closed, because rdma-core's libraries start threads and
// register fork handlers.
#pragma once

#include <dlfcn.h>

#include <initializer_list>
#include <string>

namespace verbatim {

class DynamicLibrary {
 public:
  // Opens the first of `names` that can be opened, with RTLD_LOCAL.
  static DynamicLibrary open(std::initializer_list<const char*> names);

  explicit operator bool() const { return handle_ != nullptr; }
  const std::string& name() const { return name_; }              // of the library that was opened
  const std::string& load_error() const { return load_error_; }  // dlerror()'s texts if none could be opened

  // Binds `symbol` of `version`, else its default version. False, and `function` unchanged, if the library has neither.
  template <typename Function>
  bool bind(const char* symbol, const char* version, Function& function) const {
    void* address = ::dlvsym(handle_, symbol, version);
    if (address == nullptr) address = ::dlsym(handle_, symbol);
    if (address == nullptr) return false;
    function = reinterpret_cast<Function>(address);
    return true;
  }

 private:
  void* handle_ = nullptr;
  std::string name_;
  std::string load_error_;
};

}  // namespace verbatim
