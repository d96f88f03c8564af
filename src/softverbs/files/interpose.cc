// libsoftverbs-files.so: replaces most of libc's functions with a path argument, for a process that preloads it. A path
// that belongs to the devices is answered from the tree; every other call goes to libc unchanged. A program that is
// linked statically or makes system calls itself does not call these functions.
#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/types.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "softverbs/files/file_tree.h"
#include "softverbs/files/next.h"
#include "softverbs/files/served_open.h"
#include "softverbs/files/served_path.h"

// Defines a function under another name in C++, because the headers may define it too (inline, or with other exception
// specifications).
#define SOFTVERBS_REPLACES(result, name, parameters)                                                  \
  extern "C" __attribute__((visibility("default"))) result replaced_##name parameters __asm__(#name); \
  extern "C" result replaced_##name parameters

namespace verbatim::softverbs {
namespace {

static_assert(sizeof(struct stat) == sizeof(struct stat64), "one wrapper serves both");

constexpr mode_t kNodeMode = S_IFCHR | S_IRUSR | S_IWUSR | S_IRGRP | S_IWGRP | S_IROTH | S_IWOTH;

// Calls a function of the stat family. `stat_call` follows links if its second argument is true.
template <typename Call>
int stat_path(const Path& path, struct stat* info, Call stat_call) {
  const std::optional<std::uint32_t> node = path.device_node();
  const int result = stat_call(path.get(), node.has_value());
  if (result == 0 && node) {
    info->st_mode = kNodeMode;
    info->st_rdev = makedev(kUverbsMajor, kUverbsFirstMinor + *node);
  }
  return result;
}

// Reads a link with `read_link`, as programs see its target. A target in the tree is longer than the one that they see,
// and so than their buffer may be.
template <typename ReadLink>
ssize_t show_target(const Path& path, std::string_view given, char* text, std::size_t bytes, ReadLink read_link) {
  if (path.device_node()) return fail(EINVAL);
  if (bytes == 0 || (!path.is_served() && !given.starts_with("/proc/"))) return read_link(text, bytes);
  char target[PATH_MAX];
  const ssize_t length = read_link(target, sizeof target);
  if (length < 0) return length;
  const std::string_view whole(target, static_cast<std::size_t>(length));
  const std::string_view shown = FileTree::instance().visible_path(whole).value_or(whole);
  return static_cast<ssize_t>(shown.copy(text, bytes));
}

char* show_working_directory(char* path) {
  if (path == nullptr) return nullptr;
  if (const std::optional<std::string> shown = visible(path)) std::memcpy(path, shown->c_str(), shown->size() + 1);
  return path;
}

// A shell may have started this program in a directory of the tree.
__attribute__((constructor)) void begin() {
  static_cast<void>(FileTree::instance());  // made before the program has threads and forks
  char path[PATH_MAX];
  if (next_getcwd(path, sizeof path) == nullptr || std::strstr(path, "/files-of-softverbs-") == nullptr) return;
  static_cast<void>(FileTree::instance().locate("/dev/infiniband"));
  note_directory();
}

__attribute__((destructor)) void end() {
  FileTree::instance().leave();
}

mode_t mode_argument(int flags, va_list arguments) {
  const bool has_mode = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  return has_mode ? va_arg(arguments, mode_t) : 0;
}

int open_with(Next<int(const char*, int, ...)>& next, const char* given, int flags, mode_t mode) {
  const Path path(given);
  if (path.is_served()) return open_served(path, flags);
  if (is_modules(given)) return open_modules(flags);
  return next(path.get(), flags, mode);
}

int openat_with(Next<int(int, const char*, int, ...)>& next, int directory, const char* given, int flags, mode_t mode) {
  const Path path(given, directory);
  if (path.is_served()) return open_served(path, flags);
  if (is_modules(given)) return open_modules(flags);
  return next(path.directory(), path.get(), flags, mode);
}

int flags_of(const char* mode) {
  int flags = *mode == 'r' ? 0 : O_CREAT;
  flags |= *mode == 'r' && std::strchr(mode, '+') == nullptr ? O_RDONLY : O_RDWR;
  if (std::strchr(mode, 'x') != nullptr) flags |= O_EXCL;
  if (std::strchr(mode, 'e') != nullptr) flags |= O_CLOEXEC;
  return flags;
}

FILE* freopen_with(Next<FILE*(const char*, const char*, FILE*)>& next, const char* given, const char* mode,
                   FILE* stream) {
  const Path path(given);
  if (!path.is_served()) return next(path.get(), mode, stream);
  const int fd = open_served(path, flags_of(mode));
  if (fd < 0) {
    const int error = errno;
    ::fclose(stream);
    errno = error;
    return nullptr;
  }
  char link[32];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  FILE* const file = next(link, mode, stream);
  ::close(fd);
  return file;
}

FILE* fopen_with(Next<FILE*(const char*, const char*)>& next, const char* given, const char* mode) {
  const Path path(given);
  if (!path.is_served() && !is_modules(given)) return next(path.get(), mode);
  const int flags = flags_of(mode);
  const int fd = path.is_served() ? open_served(path, flags) : open_modules(flags);
  if (fd < 0) return nullptr;
  FILE* const file = ::fdopen(fd, mode);
  if (file == nullptr) ::close(fd);
  return file;
}

char* resolve(const char* given, char* result, Next<char*(const char*, char*)>& next) {
  const Path path(given);
  if (!path.is_served()) return next(path.get(), result);
  char resolved[PATH_MAX];
  if (path.device_node()) {
    std::snprintf(resolved, sizeof resolved, "%s", path.visible().c_str());
  } else if (next(path.get(), resolved) == nullptr) {
    return nullptr;
  }
  const std::string shown = visible(resolved).value_or(resolved);
  if (result == nullptr) return ::strdup(shown.c_str());
  return static_cast<char*>(std::memcpy(result, shown.c_str(), shown.size() + 1));
}

DIR* opened(const Path& path, DIR* directory) {
  if (path.is_served() && directory != nullptr) note_directory();
  return directory;
}

Next<char*()> next_get_current_dir_name("get_current_dir_name");
Next<int(const char*, int, ...)> next_open("open");
Next<int(const char*, int, ...)> next_open64("open64");
Next<int(int, const char*, int, ...)> next_openat64("openat64");
Next<FILE*(const char*, const char*)> next_fopen("fopen");
Next<FILE*(const char*, const char*)> next_fopen64("fopen64");
Next<FILE*(const char*, const char*, FILE*)> next_freopen("freopen");
Next<FILE*(const char*, const char*, FILE*)> next_freopen64("freopen64");
// Of struct stat: glibc 2.32's <bits/stat.h>.
#ifdef __x86_64__
constexpr int kStatVersion = 1;
#else
constexpr int kStatVersion = 0;
#endif
Next<int(int, const char*, struct stat*)> next_xstat("__xstat");
Next<int(int, const char*, struct stat*)> next_lxstat("__lxstat");
Next<int(int, int, const char*, struct stat*, int)> next_fxstatat("__fxstatat");
Next<int(int, const char*, int, unsigned, struct statx*)> next_statx("statx");
Next<int(const char*, int)> next_eaccess("eaccess");
Next<int(int, const char*, int, int)> next_faccessat("faccessat");
Next<ssize_t(int, const char*, char*, std::size_t)> next_readlinkat("readlinkat");
Next<DIR*(const char*)> next_opendir("opendir");
Next<dirent*(DIR*)> next_readdir("readdir");
Next<dirent64*(DIR*)> next_readdir64("readdir64");
using Filter = int (*)(const dirent*);
using Compare = int (*)(const dirent**, const dirent**);
Next<int(const char*, dirent***, Filter, Compare)> next_scandir("scandir");
Next<void(int)> next__exit("_exit");
Next<int(const char*)> next_chdir("chdir");
Next<int(const char*, int, int (*)(const char*, int), glob_t*)> next_glob("glob", "GLIBC_2.27");
Next<ssize_t(const char*, const char*, void*, std::size_t)> next_getxattr("getxattr");
Next<ssize_t(const char*, const char*, void*, std::size_t)> next_lgetxattr("lgetxattr");
Next<ssize_t(const char*, char*, std::size_t)> next_listxattr("listxattr");
Next<ssize_t(const char*, char*, std::size_t)> next_llistxattr("llistxattr");

int do_xstat(int version, const char* given, struct stat* info) {
  return stat_path(Path(given), info, [&](const char* path, bool) { return next_xstat(version, path, info); });
}

int do_lxstat(int version, const char* given, struct stat* info) {
  return stat_path(Path(given), info, [&](const char* path, bool follow) {
    return follow ? next_xstat(version, path, info) : next_lxstat(version, path, info);
  });
}

int do_fxstatat(int version, int directory, const char* given, struct stat* info, int flags) {
  const Path path(given, directory);
  return stat_path(path, info, [&](const char* name, bool follow) {
    return next_fxstatat(version, path.directory(), name, info, follow ? flags & ~AT_SYMLINK_NOFOLLOW : flags);
  });
}

// glibc has functions with these names since 2.33, and those with a version always.
int do_stat(const char* path, struct stat* info) {
  return do_xstat(kStatVersion, path, info);
}
int do_lstat(const char* path, struct stat* info) {
  return do_lxstat(kStatVersion, path, info);
}
int do_fstatat(int directory, const char* path, struct stat* info, int flags) {
  return do_fxstatat(kStatVersion, directory, path, info, flags);
}

ssize_t do_readlink(const char* given, char* text, std::size_t bytes) {
  const Path path(given);
  return show_target(path, given != nullptr ? given : "", text, bytes,
                     [&](char* target, std::size_t size) { return next_readlink(path.get(), target, size); });
}

ssize_t do_readlinkat(int directory, const char* given, char* text, std::size_t bytes) {
  const Path path(given, directory);
  return show_target(path, given != nullptr ? given : "", text, bytes, [&](char* target, std::size_t size) {
    return next_readlinkat(path.directory(), path.get(), target, size);
  });
}

// The nodes are links in the tree. `find -type c` trusts the type that the directory gives.
constexpr std::string_view kNodes = "/dev/infiniband";
template <typename Entry>
bool may_be_node(const Entry& entry) {
  return entry.d_type == DT_LNK && std::strncmp(entry.d_name, "uverbs", std::strlen("uverbs")) == 0;
}

int do_scandir(const char* given, dirent*** names, Filter filter, Compare compare) {
  const Path path(given);
  const int count = next_scandir(path.get(), names, filter, compare);
  if (!path.is_served() || path.visible() != kNodes) return count;
  for (int i = 0; i < count; ++i) {
    if (may_be_node(*(*names)[i])) (*names)[i]->d_type = DT_CHR;
  }
  return count;
}

template <typename Function>
auto do_readdir(Next<Function>& next, DIR* directory) {
  auto* const entry = next(directory);
  if (entry == nullptr || !may_be_node(*entry) || !has_directory()) return entry;
  const int error = errno;
  char link[32];
  char base[PATH_MAX];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", ::dirfd(directory));
  const ssize_t length = next_readlink(link, base, sizeof base);
  if (length > 0 && FileTree::instance().visible_path({base, static_cast<std::size_t>(length)}) == kNodes)
    entry->d_type = DT_CHR;
  errno = error;
  return entry;
}

char* do_getcwd(char* path, std::size_t bytes) {
  char present[PATH_MAX];
  const bool known = next_getcwd(present, sizeof present) != nullptr;
  const std::optional<std::string> shown = known ? visible(present) : std::nullopt;
  if (!shown || (path != nullptr && bytes == 0)) return next_getcwd(path, bytes);
  const std::size_t needed = shown->size() + 1;
  if (bytes != 0 && bytes < needed) {
    errno = ERANGE;
    return nullptr;
  }
  char* const result = path != nullptr ? path : static_cast<char*>(std::malloc(std::max(bytes, needed)));
  return result != nullptr ? static_cast<char*>(std::memcpy(result, shown->c_str(), needed)) : nullptr;
}

// glob() calls its own stat and opendir, so it gets these to call. Its patterns keep the paths that programs see.
int do_glob(const char* pattern, int flags, int (*on_error)(const char*, int), glob_t* found) {
  const bool may_be_served = pattern[0] == '/' && (pattern[1] == 'd' || pattern[1] == 's');
  if (!may_be_served || (flags & GLOB_ALTDIRFUNC) != 0) return next_glob(pattern, flags, on_error, found);
  found->gl_opendir = [](const char* path) -> void* { return ::opendir(path); };
  found->gl_readdir = [](void* directory) { return ::readdir(static_cast<DIR*>(directory)); };
  found->gl_closedir = [](void* directory) { ::closedir(static_cast<DIR*>(directory)); };
  found->gl_stat = do_stat;
  found->gl_lstat = do_lstat;
  return next_glob(pattern, flags | GLOB_ALTDIRFUNC, on_error, found);
}

}  // namespace
}  // namespace verbatim::softverbs

using namespace verbatim::softverbs;

#define SOFTVERBS_REPLACES_OPEN(name)                                 \
  SOFTVERBS_REPLACES(int, name, (const char* path, int flags, ...)) { \
    va_list arguments;                                                \
    va_start(arguments, flags);                                       \
    const mode_t mode = mode_argument(flags, arguments);              \
    va_end(arguments);                                                \
    return open_with(next_##name, path, flags, mode);                 \
  }
#define SOFTVERBS_REPLACES_OPENAT(name)                                              \
  SOFTVERBS_REPLACES(int, name, (int directory, const char* path, int flags, ...)) { \
    va_list arguments;                                                               \
    va_start(arguments, flags);                                                      \
    const mode_t mode = mode_argument(flags, arguments);                             \
    va_end(arguments);                                                               \
    return openat_with(next_##name, directory, path, flags, mode);                   \
  }

SOFTVERBS_REPLACES_OPEN(open)
SOFTVERBS_REPLACES_OPEN(open64)
SOFTVERBS_REPLACES_OPENAT(openat)
SOFTVERBS_REPLACES_OPENAT(openat64)

// What programs compiled with _FORTIFY_SOURCE call.
SOFTVERBS_REPLACES(int, __open_2, (const char* path, int flags)) {
  return open_with(next_open, path, flags, 0);
}
SOFTVERBS_REPLACES(int, __open64_2, (const char* path, int flags)) {
  return open_with(next_open64, path, flags, 0);
}
SOFTVERBS_REPLACES(int, __openat_2, (int directory, const char* path, int flags)) {
  return openat_with(next_openat, directory, path, flags, 0);
}
SOFTVERBS_REPLACES(int, __openat64_2, (int directory, const char* path, int flags)) {
  return openat_with(next_openat64, directory, path, flags, 0);
}

SOFTVERBS_REPLACES(FILE*, fopen, (const char* path, const char* mode)) {
  return fopen_with(next_fopen, path, mode);
}
SOFTVERBS_REPLACES(FILE*, fopen64, (const char* path, const char* mode)) {
  return fopen_with(next_fopen64, path, mode);
}

SOFTVERBS_REPLACES(FILE*, freopen, (const char* path, const char* mode, FILE* stream)) {
  return freopen_with(next_freopen, path, mode, stream);
}
SOFTVERBS_REPLACES(FILE*, freopen64, (const char* path, const char* mode, FILE* stream)) {
  return freopen_with(next_freopen64, path, mode, stream);
}

SOFTVERBS_REPLACES(int, stat, (const char* path, struct stat* info)) {
  return do_stat(path, info);
}
SOFTVERBS_REPLACES(int, stat64, (const char* path, struct stat* info)) {
  return do_stat(path, info);
}
SOFTVERBS_REPLACES(int, lstat, (const char* path, struct stat* info)) {
  return do_lstat(path, info);
}
SOFTVERBS_REPLACES(int, lstat64, (const char* path, struct stat* info)) {
  return do_lstat(path, info);
}
SOFTVERBS_REPLACES(int, fstatat, (int directory, const char* path, struct stat* info, int flags)) {
  return do_fstatat(directory, path, info, flags);
}
SOFTVERBS_REPLACES(int, fstatat64, (int directory, const char* path, struct stat* info, int flags)) {
  return do_fstatat(directory, path, info, flags);
}

// What programs compiled with glibc 2.32 or older call.
SOFTVERBS_REPLACES(int, __xstat, (int version, const char* path, struct stat* info)) {
  return do_xstat(version, path, info);
}
SOFTVERBS_REPLACES(int, __xstat64, (int version, const char* path, struct stat* info)) {
  return do_xstat(version, path, info);
}
SOFTVERBS_REPLACES(int, __lxstat, (int version, const char* path, struct stat* info)) {
  return do_lxstat(version, path, info);
}
SOFTVERBS_REPLACES(int, __lxstat64, (int version, const char* path, struct stat* info)) {
  return do_lxstat(version, path, info);
}
SOFTVERBS_REPLACES(int, __fxstatat, (int version, int directory, const char* path, struct stat* info, int flags)) {
  return do_fxstatat(version, directory, path, info, flags);
}
SOFTVERBS_REPLACES(int, __fxstatat64, (int version, int directory, const char* path, struct stat* info, int flags)) {
  return do_fxstatat(version, directory, path, info, flags);
}

SOFTVERBS_REPLACES(int, statx, (int directory, const char* given, int flags, unsigned mask, struct statx* info)) {
  const Path path(given, directory);
  const std::optional<std::uint32_t> node = path.device_node();
  const int used = node ? flags & ~AT_SYMLINK_NOFOLLOW : flags;
  const int result = next_statx(path.directory(), path.get(), used, mask, info);
  if (result == 0 && node) {
    info->stx_mode = kNodeMode;
    info->stx_rdev_major = kUverbsMajor;
    info->stx_rdev_minor = kUverbsFirstMinor + *node;
  }
  return result;
}

SOFTVERBS_REPLACES(int, access, (const char* path, int mode)) {
  return next_access(Path(path).get(), mode);
}
SOFTVERBS_REPLACES(int, eaccess, (const char* path, int mode)) {
  return next_eaccess(Path(path).get(), mode);
}
SOFTVERBS_REPLACES(int, euidaccess, (const char* path, int mode)) {
  return next_eaccess(Path(path).get(), mode);
}
SOFTVERBS_REPLACES(int, faccessat, (int directory, const char* given, int mode, int flags)) {
  const Path path(given, directory);
  return next_faccessat(path.directory(), path.get(), mode, flags);
}

SOFTVERBS_REPLACES(ssize_t, readlink, (const char* path, char* text, std::size_t bytes)) {
  return do_readlink(path, text, bytes);
}
SOFTVERBS_REPLACES(ssize_t, __readlink_chk, (const char* path, char* text, std::size_t bytes, std::size_t size)) {
  return do_readlink(path, text, std::min(bytes, size));
}
SOFTVERBS_REPLACES(ssize_t, readlinkat, (int directory, const char* path, char* text, std::size_t bytes)) {
  return do_readlinkat(directory, path, text, bytes);
}
SOFTVERBS_REPLACES(ssize_t, __readlinkat_chk,
                   (int directory, const char* path, char* text, std::size_t bytes, std::size_t size)) {
  return do_readlinkat(directory, path, text, std::min(bytes, size));
}

SOFTVERBS_REPLACES(char*, realpath, (const char* path, char* result)) {
  return resolve(path, result, next_realpath);
}
SOFTVERBS_REPLACES(char*, __realpath_chk, (const char* path, char* result, std::size_t)) {
  return resolve(path, result, next_realpath);
}
SOFTVERBS_REPLACES(char*, canonicalize_file_name, (const char* path)) {
  return resolve(path, nullptr, next_realpath);
}

SOFTVERBS_REPLACES(DIR*, opendir, (const char* given)) {
  const Path path(given);
  return opened(path, next_opendir(path.get()));
}
SOFTVERBS_REPLACES(dirent*, readdir, (DIR * directory)) {
  return do_readdir(next_readdir, directory);
}
SOFTVERBS_REPLACES(dirent64*, readdir64, (DIR * directory)) {
  return do_readdir(next_readdir64, directory);
}
SOFTVERBS_REPLACES(int, scandir, (const char* path, dirent*** names, Filter filter, Compare compare)) {
  return do_scandir(path, names, filter, compare);
}
SOFTVERBS_REPLACES(int, scandir64, (const char* path, dirent*** names, Filter filter, Compare compare)) {
  return do_scandir(path, names, filter, compare);
}
SOFTVERBS_REPLACES(int, glob, (const char* pattern, int flags, int (*on_error)(const char*, int), glob_t* found)) {
  return do_glob(pattern, flags, on_error, found);
}
SOFTVERBS_REPLACES(int, glob64, (const char* pattern, int flags, int (*on_error)(const char*, int), glob_t* found)) {
  return do_glob(pattern, flags, on_error, found);
}

SOFTVERBS_REPLACES(int, chdir, (const char* given)) {
  const Path path(given);
  const int result = next_chdir(path.get());
  if (result == 0 && path.is_served()) note_directory();
  return result;
}
SOFTVERBS_REPLACES(char*, getcwd, (char* path, std::size_t bytes)) {
  return do_getcwd(path, bytes);
}
SOFTVERBS_REPLACES(char*, __getcwd_chk, (char* path, std::size_t bytes, std::size_t size)) {
  return do_getcwd(path, std::min(bytes, size));
}
SOFTVERBS_REPLACES(char*, get_current_dir_name, ()) {
  return show_working_directory(next_get_current_dir_name());
}

// Shells and forked children end without the destructors.
SOFTVERBS_REPLACES(void, _exit, (int status)) {
  FileTree::instance().leave();
  next__exit(status);
  __builtin_unreachable();
}
SOFTVERBS_REPLACES(void, _Exit, (int status)) {
  FileTree::instance().leave();
  next__exit(status);
  __builtin_unreachable();
}

// ls -l reads these.
SOFTVERBS_REPLACES(ssize_t, getxattr, (const char* path, const char* name, void* value, std::size_t bytes)) {
  return next_getxattr(Path(path).get(), name, value, bytes);
}
SOFTVERBS_REPLACES(ssize_t, lgetxattr, (const char* path, const char* name, void* value, std::size_t bytes)) {
  return next_lgetxattr(Path(path).get(), name, value, bytes);
}
SOFTVERBS_REPLACES(ssize_t, listxattr, (const char* path, char* names, std::size_t bytes)) {
  return next_listxattr(Path(path).get(), names, bytes);
}
SOFTVERBS_REPLACES(ssize_t, llistxattr, (const char* path, char* names, std::size_t bytes)) {
  return next_llistxattr(Path(path).get(), names, bytes);
}
