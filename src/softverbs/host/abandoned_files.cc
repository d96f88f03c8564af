#include "softverbs/host/abandoned_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"
#include "softverbs/host/file_trees.h"
#include "softverbs/host/layout.h"
#include "softverbs/host/shm_file.h"

namespace verbatim::softverbs {
namespace {

constexpr std::string_view kDigits = "0123456789";

// Takes a number from the beginning of `text`. False: it does not begin with one.
bool take_number(std::string_view& text) {
  const std::size_t digits = std::min(text.find_first_not_of(kDigits), text.size());
  text.remove_prefix(digits);
  return digits != 0;
}

bool take(std::string_view& text, std::string_view expected) {
  if (!text.starts_with(expected)) return false;
  text.remove_prefix(expected.size());
  return true;
}

// softverbsVERSION-UID-PIDNAMESPACE or softverbsVERSION-shared, and -NAMESPACE behind it if there is one; without a
// dot. Of any version: all hold the same locks. Other files, which a user may have called softverbs-something, are not
// ours.
bool is_registry_name(std::string_view name) {
  if (!take(name, "softverbs") || !take_number(name) || !take(name, "-")) return false;
  if (!take(name, "shared") && !(take_number(name) && take(name, "-") && take_number(name))) return false;
  return name.empty() || name.front() == '-';
}

// The files of one registry of this user: NAME, and NAME.INCARNATION for each segment. A namespace has no dot in its
// name.
struct Files {
  bool has_registry = false;
  std::vector<std::string> segments;  // paths
};

std::map<std::string, Files> list_registries(const std::string& path) {
  std::map<std::string, Files> registries;
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(path.c_str()), ::closedir);
  if (!directory) return registries;
  while (const dirent* const entry = ::readdir(directory.get())) {
    const std::string_view file = entry->d_name;
    const std::size_t dot = file.find('.');
    struct stat info {};
    if (!is_registry_name(file.substr(0, dot)) ||
        ::fstatat(::dirfd(directory.get()), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0)
      continue;
    if (info.st_uid != ::geteuid()) continue;
    Files& files = registries[path + "/" + std::string(file.substr(0, dot))];
    if (dot == std::string::npos) {
      files.has_registry = true;
    } else {
      files.segments.push_back(path + "/" + std::string(file));
    }
  }
  return registries;
}

// A running process holds a record lock on a byte of its registry. A pid would not do: processes of another PID
// namespace have pids that mean nothing here.
bool is_used(int fd) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return ::fcntl(fd, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

// softverbs hold may be called before the first process starts, so a held clock keeps a registry without processes.
bool has_held_clock(const UniqueFd& fd, const struct stat& info) {
  if (info.st_size != static_cast<off_t>(sizeof(Registry))) return false;
  const Result<Mapping> mapping = map_shm(fd, sizeof(Registry));
  return !mapping || mapping->as<Registry>()->clock.held != 0;
}

bool exists(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0;
}

void remove_if_abandoned(const std::string& name, const Files& files) {
  // Another process may have removed the files since they were listed.
  if (!files.has_registry && std::none_of(files.segments.begin(), files.segments.end(), exists)) return;
  // Created if only segments are left, because without its lock another process might create it and use their names.
  const int create = files.has_registry ? 0 : O_CREAT;
  const UniqueFd fd(::open(name.c_str(), O_RDWR | create | O_CLOEXEC | O_NOFOLLOW, S_IRUSR | S_IWUSR));
  struct stat info {};
  // Each process joins and leaves under this lock. If a process does so now, the registry is in use.
  if (!fd || ::flock(fd.get(), LOCK_EX | LOCK_NB) != 0 || ::fstat(fd.get(), &info) != 0) return;
  if (info.st_uid != ::geteuid() || !S_ISREG(info.st_mode) || info.st_nlink == 0 || is_used(fd.get())) return;
  for (const std::string& segment : files.segments) ::unlink(segment.c_str());
  if (!has_held_clock(fd, info)) ::unlink(name.c_str());
}

}  // namespace

void remove_abandoned_files(const std::string& own) {
  remove_unused_file_trees();
  for (const auto& [name, files] : list_registries(own.substr(0, own.rfind('/')))) {
    if (name != own) remove_if_abandoned(name, files);
  }
}

}  // namespace verbatim::softverbs
