#include "softverbs/host/file_trees.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

#include "base/unique_fd.h"

namespace verbatim::softverbs {
namespace {

constexpr const char* kParent = "/dev/shm/";
constexpr const char* kName = "files-of-softverbs-";  // unlike a registry's name: see abandoned_files

// Does not follow links.
void remove_all(int parent, const char* name) {
  if (::unlinkat(parent, name, 0) == 0 || (errno != EISDIR && errno != EPERM)) return;
  const UniqueFd fd(::openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd) return;
  alignas(dirent64) char entries[2048];
  // A read continues behind the entries that were removed.
  for (ssize_t length = 0; (length = ::getdents64(fd.get(), entries, sizeof entries)) > 0;) {
    for (ssize_t at = 0; at < length;) {
      const auto* const entry = reinterpret_cast<const dirent64*>(entries + at);
      if (std::strcmp(entry->d_name, ".") != 0 && std::strcmp(entry->d_name, "..") != 0)
        remove_all(fd.get(), entry->d_name);
      at += entry->d_reclen;
    }
  }
  ::unlinkat(parent, name, AT_REMOVEDIR);
}

}  // namespace

std::string file_tree_prefix() {
  return kParent + (kName + std::to_string(::geteuid())) + "-";
}

void remove_directory(const std::string& path) {
  remove_all(AT_FDCWD, path.c_str());
}

void remove_file_tree_if_unused(const char* path) {
  const UniqueFd fd(::open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat locked {};
  struct stat named {};
  if (!fd || ::fstat(fd.get(), &locked) != 0 || locked.st_uid != ::geteuid()) return;
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) return;
  // Another process may have removed this tree and made it anew.
  if (::lstat(path, &named) != 0 || named.st_ino != locked.st_ino) return;
  char removed[PATH_MAX];
  if (std::snprintf(removed, sizeof removed, "%s.old.%s", path, kRandomPart) >= static_cast<int>(sizeof removed))
    return;
  if (::mkdtemp(removed) == nullptr || ::rename(path, removed) != 0) return;
  remove_all(AT_FDCWD, removed);
}

void remove_unused_file_trees() {
  const std::string prefix = file_tree_prefix();
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(kParent), ::closedir);
  if (!directory) return;
  while (const dirent* const entry = ::readdir(directory.get())) {
    const std::string path = std::string(kParent) + entry->d_name;
    if (path.starts_with(prefix)) remove_file_tree_if_unused(path.c_str());
  }
}

}  // namespace verbatim::softverbs
