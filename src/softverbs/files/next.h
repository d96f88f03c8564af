// libc's functions that libsoftverbs-files.so replaces, as they are behind it.
#pragma once

#include <dlfcn.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>

namespace verbatim::softverbs {

// The version of the C library's first functions on x86-64. On other machines the differences are harmless.
inline constexpr const char* kOldest = "GLIBC_2.2.5";

// The definition behind this library's, looked up at the first call: programs and allocators call these functions
// before any constructor of this library runs. dlsym allocates no memory when it succeeds. Before glibc 2.36 it finds
// the oldest version of a function (bug 14932), so `version` names the current one where there are several.
template <typename Function>
class Next {
 public:
  constexpr explicit Next(const char* name, const char* version = nullptr) : name_(name), version_(version) {}

  template <typename... Arguments>
  auto operator()(Arguments... arguments) {
    Function* function = function_.load(std::memory_order_relaxed);
    if (function == nullptr) {
      void* found = ::dlsym(RTLD_NEXT, name_);
      const bool is_old = version_ != nullptr && found == ::dlvsym(RTLD_NEXT, name_, kOldest);
      if (is_old) found = ::dlvsym(RTLD_NEXT, name_, version_);
      function = reinterpret_cast<Function*>(found);
      function_.store(function, std::memory_order_relaxed);
    }
    return function(arguments...);
  }

 private:
  const char* const name_;
  const char* const version_;
  std::atomic<Function*> function_{nullptr};
};

// Those that several files call.
inline Next<char*(char*, std::size_t)> next_getcwd("getcwd");
inline Next<ssize_t(const char*, char*, std::size_t)> next_readlink("readlink");
inline Next<int(const char*, int)> next_access("access");
inline Next<int(int, const char*, int, ...)> next_openat("openat");
inline Next<char*(const char*, char*)> next_realpath("realpath", "GLIBC_2.3");

}  // namespace verbatim::softverbs
