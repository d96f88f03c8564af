// What the C++ runtime, libraries that are linked in or our sources use of glibc's versions after 2.28: the system's
// functions where it has them, else older ones. For programs and libraries of packages; make_stubs.py links them with
// it.
//
// Sources: the manual pages of the functions; for _dl_find_object, glibc 2.35's <dlfcn.h> and manual (Dynamic Linker
// Introspection).
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "stat_version.h"

namespace {

constexpr long kNanosecondsPerSecond = 1'000'000'000;

// The system's function, or `older`. Where there is none, dlsym replaces the text of dlerror, once.
template <typename Function>
Function* find(std::atomic<Function*>& known, const char* name, Function* older) {
  Function* function = known.load(std::memory_order_acquire);
  if (function == nullptr) {
    function = reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
    if (function == nullptr) function = older;
    known.store(function, std::memory_order_release);
  }
  return function;
}

using Wait = int(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
using FindObject = int(void*, dl_find_object*);

timespec sum(timespec time, const timespec& added, int sign) {
  time.tv_sec += sign * added.tv_sec;
  time.tv_nsec += sign * added.tv_nsec;
  if (time.tv_nsec < 0) {
    time.tv_nsec += kNanosecondsPerSecond;
    --time.tv_sec;
  } else if (time.tv_nsec >= kNanosecondsPerSecond) {
    time.tv_nsec -= kNanosecondsPerSecond;
    ++time.tv_sec;
  }
  return time;
}

// A condition without attributes waits by the clock of the calendar, which can be set meanwhile: so it waits for a
// second at most, and `clock` says whether the time has come.
int wait_by_calendar(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* end) {
  for (;;) {
    timespec now{};
    ::clock_gettime(clock, &now);
    timespec left = sum(*end, now, -1);
    if (left.tv_sec < 0) left = {};
    const bool is_last = left.tv_sec == 0;
    ::clock_gettime(CLOCK_REALTIME, &now);
    const timespec next = sum(now, is_last ? left : timespec{1, 0}, 1);
    const int error = ::pthread_cond_timedwait(condition, mutex, &next);
    if (error != ETIMEDOUT || is_last) return error;
  }
}

struct Search {
  std::uintptr_t address;
  dl_find_object* result;
};

// Looks for the address in an object: where its tables for exceptions are.
int visit(dl_phdr_info* object, std::size_t, void* data) {
  const Search& search = *static_cast<Search*>(data);
  const ElfW(Phdr)* tables = nullptr;
  const ElfW(Phdr)* found = nullptr;
  std::uintptr_t first = ~std::uintptr_t{0};
  std::uintptr_t end = 0;
  for (std::size_t i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = object->dlpi_phdr[i];
    const std::uintptr_t start = object->dlpi_addr + segment.p_vaddr;
    if (segment.p_type == PT_GNU_EH_FRAME) tables = &segment;
    if (segment.p_type != PT_LOAD) continue;
    first = start < first ? start : first;
    end = start + segment.p_memsz > end ? start + segment.p_memsz : end;
    if (search.address >= start && search.address - start < segment.p_memsz) found = &segment;
  }
  if (found == nullptr || tables == nullptr) return 0;
  search.result->dlfo_map_start = reinterpret_cast<void*>(first);
  search.result->dlfo_map_end = reinterpret_cast<void*>(end);
  search.result->dlfo_link_map = nullptr;
  search.result->dlfo_eh_frame = reinterpret_cast<void*>(object->dlpi_addr + tables->p_vaddr);
  return 1;
}

int find_by_iterating(void* address, dl_find_object* result) {
  Search search{reinterpret_cast<std::uintptr_t>(address), result};
  return ::dl_iterate_phdr(visit, &search) != 0 ? 0 : -1;
}

std::atomic<Wait*> g_wait{nullptr};
std::atomic<FindObject*> g_find_object{nullptr};

}  // namespace

extern "C" {

int __fxstat64(int version, int fd, struct stat64* result);  // NOLINT

// ---- glibc 2.30

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* end) {
  return find(g_wait, "pthread_cond_clockwait", wait_by_calendar)(condition, mutex, clock, end);
}

ssize_t getdents64(int directory, void* entries, std::size_t bytes) {
  return ::syscall(SYS_getdents64, directory, entries, bytes);
}

// ---- glibc 2.32: whether the process has one thread, so that reference counts need no atomic instructions. It may.
extern char __libc_single_threaded;  // NOLINT
char __libc_single_threaded = 0;     // NOLINT

// ---- glibc 2.33. stat.cc has the others.

int fstat64(int fd, struct stat64* result) {
  return __fxstat64(kStatVersion, fd, result);
}
int fstat(int, struct stat64*) __attribute__((alias("fstat64")));

// ---- glibc 2.35

int _dl_find_object(void* address, dl_find_object* result) {  // NOLINT
  return find(g_find_object, "_dl_find_object", find_by_iterating)(address, result);
}

// ---- glibc 2.36

void arc4random_buf(void* into, std::size_t bytes) {
  for (std::size_t filled = 0; filled < bytes;) {
    const ssize_t count = ::getrandom(static_cast<char*>(into) + filled, bytes - filled, 0);
    if (count < 0 && errno != EINTR) std::abort();
    if (count > 0) filled += static_cast<std::size_t>(count);
  }
}

std::uint32_t arc4random() {
  std::uint32_t number = 0;
  arc4random_buf(&number, sizeof number);
  return number;
}

// ---- glibc 2.38: what its headers make of strtol and others. The older functions do not know "0b", which C23 has. A
// call of them by their usual names would be one of the newer functions again.

long older_strtol(const char* text, char** end, int base) __asm__("strtol");
unsigned long older_strtoul(const char* text, char** end, int base) __asm__("strtoul");
long long older_strtoll(const char* text, char** end, int base) __asm__("strtoll");
unsigned long long older_strtoull(const char* text, char** end, int base) __asm__("strtoull");
int older_vsscanf(const char* text, const char* format, std::va_list values) __asm__("__isoc99_vsscanf");
int older_vfscanf(std::FILE* file, const char* format, std::va_list values) __asm__("__isoc99_vfscanf");

long __isoc23_strtol(const char* text, char** end, int base) {  // NOLINT
  return older_strtol(text, end, base);
}

unsigned long __isoc23_strtoul(const char* text, char** end, int base) {  // NOLINT
  return older_strtoul(text, end, base);
}

long long __isoc23_strtoll(const char* text, char** end, int base) {  // NOLINT
  return older_strtoll(text, end, base);
}

unsigned long long __isoc23_strtoull(const char* text, char** end, int base) {  // NOLINT
  return older_strtoull(text, end, base);
}

int __isoc23_sscanf(const char* text, const char* format, ...) {  // NOLINT
  std::va_list values;
  va_start(values, format);
  const int read = older_vsscanf(text, format, values);
  va_end(values);
  return read;
}

int __isoc23_fscanf(std::FILE* file, const char* format, ...) {  // NOLINT
  std::va_list values;
  va_start(values, format);
  const int read = older_vfscanf(file, format, values);
  va_end(values);
  return read;
}

std::size_t strlcpy(char* into, const char* text, std::size_t bytes) {
  const std::size_t length = std::strlen(text);
  if (bytes != 0) {
    const std::size_t copied = std::min(length, bytes - 1);
    std::memcpy(into, text, copied);
    into[copied] = '\0';
  }
  return length;
}

}  // extern "C"
