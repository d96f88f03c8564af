// libc's functions that libsoftverbs-files.so replaces, as they are behind it.
#pragma once

#include <dlfcn.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>

namespace verbatim::softverbs {

// The definition behind this library's, looked up at the first call: programs and allocators call these functions
// before any constructor of this library runs. dlsym allocates no memory when it succeeds.
template <typename Function>
class Next {
 public:
  constexpr explicit Next(const char* name) : name_(name) {}

  template <typename... Arguments>
  auto operator()(Arguments... arguments) {
    Function* function = function_.load(std::memory_order_relaxed);
    if (function == nullptr) {
      function = reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name_));
      function_.store(function, std::memory_order_relaxed);
    }
    return function(arguments...);
  }

 private:
  const char* const name_;
  std::atomic<Function*> function_{nullptr};
};

// Those that several files call.
inline Next<char*(char*, std::size_t)> next_getcwd("getcwd");
inline Next<ssize_t(const char*, char*, std::size_t)> next_readlink("readlink");
inline Next<int(const char*, int)> next_access("access");
inline Next<int(int, const char*, int, ...)> next_openat("openat");
inline Next<char*(const char*, char*)> next_realpath("realpath");

}  // namespace verbatim::softverbs
