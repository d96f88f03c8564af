#include "softverbs/host/file_trees.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
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
  const int fd = ::openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return;
  if (const std::unique_ptr<DIR, int (*)(DIR*)> directory(::fdopendir(fd), ::closedir); directory) {
    while (const dirent* const entry = ::readdir(directory.get())) {
      if (std::strcmp(entry->d_name, ".") != 0 && std::strcmp(entry->d_name, "..") != 0) remove_all(fd, entry->d_name);
    }
  } else {
    ::close(fd);
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

void remove_file_tree_if_unused(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat locked {};
  struct stat named {};
  if (!fd || ::flock(fd.get(), LOCK_EX | LOCK_NB) != 0 || ::fstat(fd.get(), &locked) != 0) return;
  // Another process may have removed this tree and made it anew.
  if (::lstat(path.c_str(), &named) != 0 || named.st_ino != locked.st_ino || named.st_uid != ::geteuid()) return;
  std::string removed = path + ".old.XXXXXX";
  if (::mkdtemp(removed.data()) == nullptr || ::rename(path.c_str(), removed.c_str()) != 0) return;
  remove_directory(removed);
}

void remove_unused_file_trees() {
  const std::string prefix = file_tree_prefix();
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(kParent), ::closedir);
  if (!directory) return;
  while (const dirent* const entry = ::readdir(directory.get())) {
    const std::string path = std::string(kParent) + entry->d_name;
    if (path.starts_with(prefix)) remove_file_tree_if_unused(path);
  }
}

}  // namespace verbatim::softverbs
