// A shared library opened at run time and never closed: rdma-core's libraries leave threads, fork handlers and provider
// tables behind.
#pragma once

#include <initializer_list>
#include <string>

namespace verbatim {

class DynamicLibrary {
 public:
  // Opens the first of `names` that can be opened, with its symbols kept to itself.
  static DynamicLibrary open(std::initializer_list<const char*> names);

  explicit operator bool() const { return handle_ != nullptr; }
  const std::string& name() const { return name_; }              // the one that was opened
  const std::string& load_error() const { return load_error_; }  // the loader's words, when none was

  // The symbol of this version, else the library's default one. False, and `function` untouched, when it has neither.
  template <typename Function>
  bool bind(const char* symbol, const char* version, Function& function) const {
    void* address = find(symbol, version);
    if (address == nullptr) return false;
    function = reinterpret_cast<Function>(address);
    return true;
  }

 private:
  void* find(const char* symbol, const char* version) const;

  void* handle_ = nullptr;
  std::string name_;
  std::string load_error_;
};

}  // namespace verbatim
