#include "system_calls.h"

#include <dirent.h>
#include <ifaddrs.h>
#include <link.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <new>

#include "support/next_function.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FAULT_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FAULT_SANITIZED 1
#endif
#endif

namespace fault {
namespace {

std::atomic<std::uintptr_t> g_begin{0};
std::atomic<std::uintptr_t> g_end{0};

bool comes_from_library(const void* caller) {
  const auto address = reinterpret_cast<std::uintptr_t>(caller);
  return address >= g_begin && address < g_end;
}

// The errno with which a call from `caller` must fail; 0 when it must not fail.
int injected_error(const char* name, const void* caller) {
  return comes_from_library(caller) ? failing_system_call().next_error(name) : 0;
}

}  // namespace

// Shared with forked children: a process sees which calls of its child have failed.
verbatim::test::FailNth& failing_system_call() {
  static auto& only =
      *new (::mmap(nullptr, sizeof(verbatim::test::FailNth), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
          verbatim::test::FailNth;
  return only;
}

void watch_library(const std::string& path) {
  struct Search {
    const std::string& path;
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
  } search{path};
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* argument) {
        auto& found = *static_cast<Search*>(argument);
        if (found.path != info->dlpi_name) return 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type != PT_LOAD || (info->dlpi_phdr[i].p_flags & PF_X) == 0) continue;
          found.begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
          found.end = found.begin + info->dlpi_phdr[i].p_memsz;
        }
        return 1;
      },
      &search);
  g_begin = search.begin;
  g_end = search.end;
}

void watch_nothing() {
  g_begin = 0;
  g_end = 0;
}

}  // namespace fault

// Each function is defined under another C++ name, because the headers of the C library declare it with other
// specifiers. The next function is resolved before main: a plugin that is being unloaded holds the loader's lock while
// it waits for its thread, so a dlsym in that thread would block.
// NOLINTBEGIN(bugprone-macro-parentheses): a list of parameters takes no more parentheses
#define INTERPOSE(result, symbol, failed, parameters, arguments)                                                   \
  static result(*next_##symbol) parameters = nullptr;                                                              \
  extern "C" __attribute__((visibility("default"))) result interposed_##symbol parameters __asm__(#symbol);        \
  result interposed_##symbol parameters {                                                                          \
    if (const int error = fault::injected_error(#symbol, __builtin_return_address(0)); error != 0) {               \
      errno = error;                                                                                               \
      return failed;                                                                                               \
    }                                                                                                              \
    if (next_##symbol == nullptr) next_##symbol = verbatim::test::next_function<decltype(next_##symbol)>(#symbol); \
    return next_##symbol arguments;                                                                                \
  }                                                                                                                \
  __attribute__((constructor)) static void find_##symbol() {                                                       \
    next_##symbol = verbatim::test::next_function<decltype(next_##symbol)>(#symbol);                               \
  }
// NOLINTEND(bugprone-macro-parentheses)

INTERPOSE(int, socket, -1, (int domain, int type, int protocol), (domain, type, protocol))
INTERPOSE(int, bind, -1, (int fd, const sockaddr* address, socklen_t bytes), (fd, address, bytes))
INTERPOSE(int, listen, -1, (int fd, int backlog), (fd, backlog))
INTERPOSE(int, connect, -1, (int fd, const sockaddr* address, socklen_t bytes), (fd, address, bytes))
INTERPOSE(int, accept4, -1, (int fd, sockaddr* address, socklen_t* bytes, int flags), (fd, address, bytes, flags))
INTERPOSE(int, getsockname, -1, (int fd, sockaddr* address, socklen_t* bytes), (fd, address, bytes))
INTERPOSE(int, getpeername, -1, (int fd, sockaddr* address, socklen_t* bytes), (fd, address, bytes))
INTERPOSE(int, getsockopt, -1, (int fd, int level, int name, void* value, socklen_t* bytes),
          (fd, level, name, value, bytes))
INTERPOSE(int, setsockopt, -1, (int fd, int level, int name, const void* value, socklen_t bytes),
          (fd, level, name, value, bytes))
INTERPOSE(int, poll, -1, (pollfd * fds, nfds_t count, int timeout), (fds, count, timeout))
INTERPOSE(ssize_t, recv, -1, (int fd, void* data, std::size_t bytes, int flags), (fd, data, bytes, flags))
INTERPOSE(ssize_t, send, -1, (int fd, const void* data, std::size_t bytes, int flags), (fd, data, bytes, flags))
INTERPOSE(ssize_t, read, -1, (int fd, void* data, std::size_t bytes), (fd, data, bytes))
INTERPOSE(ssize_t, write, -1, (int fd, const void* data, std::size_t bytes), (fd, data, bytes))
INTERPOSE(int, epoll_create1, -1, (int flags), (flags))
INTERPOSE(int, epoll_ctl, -1, (int epoll, int operation, int fd, epoll_event* event), (epoll, operation, fd, event))
INTERPOSE(int, epoll_wait, -1, (int epoll, epoll_event* events, int max_events, int timeout),
          (epoll, events, max_events, timeout))
INTERPOSE(int, eventfd, -1, (unsigned initial, int flags), (initial, flags))
INTERPOSE(int, timerfd_create, -1, (int clock, int flags), (clock, flags))
INTERPOSE(int, getifaddrs, -1, (ifaddrs * *list), (list))
INTERPOSE(int, gethostname, -1, (char* name, std::size_t bytes), (name, bytes))
INTERPOSE(ssize_t, getrandom, -1, (void* data, std::size_t bytes, unsigned flags), (data, bytes, flags))
INTERPOSE(char*, realpath, nullptr, (const char* path, char* resolved), (path, resolved))
INTERPOSE(int, access, -1, (const char* path, int mode), (path, mode))
INTERPOSE(FILE*, fopen64, nullptr, (const char* path, const char* mode), (path, mode))
INTERPOSE(int, fchmod, -1, (int fd, mode_t mode), (fd, mode))
INTERPOSE(int, fstat64, -1, (int fd, struct stat* found), (fd, found))
INTERPOSE(int, lstat64, -1, (const char* path, struct stat* found), (path, found))
INTERPOSE(int, rename, -1, (const char* from, const char* to), (from, to))
INTERPOSE(int, unlink, -1, (const char* path), (path))
INTERPOSE(int, mkdir, -1, (const char* path, mode_t mode), (path, mode))
INTERPOSE(DIR*, opendir, nullptr, (const char* path), (path))
INTERPOSE(dirent*, readdir64, nullptr, (DIR * directory), (directory))
INTERPOSE(void*, mmap64, MAP_FAILED, (void* address, std::size_t bytes, int protection, int flags, int fd, off64_t at),
          (address, bytes, protection, flags, fd, at))
INTERPOSE(int, munmap, -1, (void* address, std::size_t bytes), (address, bytes))
INTERPOSE(int, pthread_create, error,
          (pthread_t * thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument),
          (thread, attributes, run, argument))

// The last argument is optional; passing on an argument that the caller did not pass is harmless.
INTERPOSE(int, fcntl64, -1, (int fd, int command, void* argument), (fd, command, argument))
INTERPOSE(int, open64, -1, (const char* path, int flags, unsigned mode), (path, flags, mode))
INTERPOSE(int, open, -1, (const char* path, int flags, unsigned mode), (path, flags, mode))
INTERPOSE(int, ioctl, -1, (int fd, unsigned long request, void* argument), (fd, request, argument))

#ifndef FAULT_SANITIZED
// operator new allocates with malloc. A sanitizer replaces the allocator.
extern "C" void* __libc_malloc(std::size_t bytes);
extern "C" __attribute__((visibility("default"))) void* interposed_malloc(std::size_t bytes) __asm__("malloc");
void* interposed_malloc(std::size_t bytes) {
  if (fault::injected_error("malloc", __builtin_return_address(0)) != 0) {
    errno = ENOMEM;
    return nullptr;
  }
  return __libc_malloc(bytes);
}
extern "C" void* __libc_calloc(std::size_t count, std::size_t bytes);
extern "C" __attribute__((visibility("default"))) void* interposed_calloc(std::size_t count,
                                                                          std::size_t bytes) __asm__("calloc");
void* interposed_calloc(std::size_t count, std::size_t bytes) {
  if (fault::injected_error("calloc", __builtin_return_address(0)) != 0) {
    errno = ENOMEM;
    return nullptr;
  }
  return __libc_calloc(count, bytes);
}
INTERPOSE(void*, aligned_alloc, nullptr, (std::size_t alignment, std::size_t bytes), (alignment, bytes))
#endif
