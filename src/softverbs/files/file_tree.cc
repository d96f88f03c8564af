#include "softverbs/files/file_tree.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/log.h"
#include "base/unique_fd.h"
#include "softverbs/host/device_attributes.h"
#include "softverbs/host/file_trees.h"

namespace verbatim::softverbs {

// For waiters of a shared lock; this library takes none.
bool is_alive(Incarnation) {
  return true;
}

namespace {

constexpr int kLowestFd = 100;  // programs and shells expect that the lowest descriptors are their own

// All served paths begin with one of these.
constexpr std::array<std::string_view, 7> kCandidates{
    "/dev/infiniband",  "/sys/class/infiniband", "/sys/class/pci_bus/",        "/sys/bus/pci/devices",
    "/sys/devices/pci", "/sys/module/nv",        "/sys/kernel/mm/memory_peers"};

// FNV-1a.
std::uint64_t hash(const Tree& tree) {
  std::uint64_t value = 0xcbf2'9ce4'8422'2325;
  const auto add = [&](std::string_view text) {
    for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100'0000'01b3;
    value = (value ^ 0xff) * 0x100'0000'01b3;
  };
  for (const Node& node : tree.nodes) {
    add(node.path);
    add(std::to_string(static_cast<int>(node.kind)));
    add(node.content);
  }
  return value;
}

// The permissions do not depend on the umask of the program that happens to make the tree.
bool make_if_missing(const std::string& path) {
  return ::mkdir(path.c_str(), S_IRWXU) == 0 ? ::chmod(path.c_str(), S_IRWXU) == 0 : errno == EEXIST;
}

bool make_parents(const std::string& path, std::size_t from) {
  for (std::size_t slash = path.find('/', from); slash != std::string::npos; slash = path.find('/', slash + 1)) {
    if (!make_if_missing(path.substr(0, slash))) return false;
  }
  return true;
}

bool write_file(const std::string& path, const std::string& content) {
  const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, S_IRUSR));
  if (!fd) return false;
  const ssize_t written = ::write(fd.get(), content.data(), content.size());
  if (written >= 0 && written < static_cast<ssize_t>(content.size())) errno = ENOSPC;
  return written == static_cast<ssize_t>(content.size()) && ::fchmod(fd.get(), S_IRUSR | S_IRGRP | S_IROTH) == 0;
}

bool write_tree(const Tree& tree, const std::string& root) {
  for (const Node& node : tree.nodes) {
    const std::string path = root + node.path;
    if (!make_parents(path, root.size() + 1)) return false;
    switch (node.kind) {
      case NodeKind::kDirectory:
        if (!make_if_missing(path)) return false;
        break;
      case NodeKind::kFile:
        if (!write_file(path, node.content)) return false;
        break;
      case NodeKind::kLink:
        if (::symlink(node.content.c_str(), path.c_str()) != 0) return false;
        break;
    }
  }
  return true;
}

}  // namespace

// Holds mutex_ and makes the calling thread's own file calls pass to the system.
class FileTree::Use {
 public:
  explicit Use(FileTree& tree) : tree_(tree), nested_(tree.user_.load(std::memory_order_relaxed) == ::pthread_self()) {
    if (nested_) return;
    ::pthread_mutex_lock(&tree_.mutex_);
    tree_.user_.store(::pthread_self(), std::memory_order_relaxed);
  }
  ~Use() {
    if (nested_) return;
    tree_.user_.store(pthread_t{}, std::memory_order_relaxed);
    ::pthread_mutex_unlock(&tree_.mutex_);
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

  bool is_nested() const { return nested_; }

 private:
  FileTree& tree_;
  const bool nested_;
};

FileTree& FileTree::instance() {
  static FileTree& tree = *[] {
    auto* const made = new FileTree;  // never destroyed: other libraries' destructors may still open files
    ::pthread_atfork([] { ::pthread_mutex_lock(&instance().mutex_); },
                     [] { ::pthread_mutex_unlock(&instance().mutex_); },
                     [] {
                       instance().pid_.store(::getpid(), std::memory_order_relaxed);
                       ::pthread_mutex_unlock(&instance().mutex_);
                     });
    return made;
  }();
  return tree;
}

bool FileTree::is_candidate(const char* path) {
  for (const std::string_view candidate : kCandidates) {
    if (std::strncmp(path, candidate.data(), candidate.size()) == 0) return true;
  }
  return false;
}

// A malformed setting is reported by libibverbs; here it means that there is no device.
void FileTree::prepare() {
  if (prepared_) return;
  prepared_ = true;
  set_log_sink([](LogLevel, const char*, int, const char*) {});
  settings_ = read_settings();
  Settings none;
  none.devices = 0;
  tree_ = make_tree(settings_ ? *settings_ : none);
  char number[17];
  std::snprintf(number, sizeof number, "%016lx", static_cast<unsigned long>(hash(tree_)));
  name_ = number;
}

bool FileTree::is_served(std::string_view path) const {
  if (std::find(tree_.listed.begin(), tree_.listed.end(), path) != tree_.listed.end()) return true;
  for (const std::string_view served : tree_.served) {
    if (path.starts_with(served) && (path.size() == served.size() || path[served.size()] == '/')) return true;
  }
  return false;
}

std::string FileTree::locate(std::string_view path) {
  const Use use(*this);
  if (use.is_nested()) return {};
  const int error = errno;
  prepare();
  std::string located;
  if (is_served(path) && ensure_directory()) located = root() + std::string(path);
  errno = error;
  return located;
}

std::optional<std::string_view> FileTree::visible_path(std::string_view path) const {
  const std::string* const root = root_.load(std::memory_order_acquire);
  if (root == nullptr || !path.starts_with(*root)) return std::nullopt;
  path.remove_prefix(root->size());
  if (path.empty()) return "/";
  if (path.front() != '/') return std::nullopt;
  return path;
}

std::optional<PortFile> FileTree::read_port_file(const std::string& located) {
  const Use use(*this);
  if (use.is_nested() || !settings_) return std::nullopt;
  const std::unique_ptr<char, void (*)(void*)> resolved(::realpath(located.c_str(), nullptr), std::free);
  if (!resolved) return std::nullopt;
  const std::optional<PortFileName> wanted = parse_port_file(resolved.get());
  if (!wanted) return std::nullopt;
  if (!observer_) observer_ = std::make_unique<HostObserver>(*settings_);
  auto port = std::make_unique<SharedPort>();
  fill_port(*port, wanted->device, *settings_);
  observer_->copy_port(wanted->device, *port);
  HostTraffic traffic{};
  if (wanted->name.find("counters/") != std::string_view::npos) observer_->add_traffic(traffic);
  for (PortFile& file : port_files(*port, wanted->device, traffic[wanted->device], *settings_)) {
    if (file.name == wanted->name) return std::move(file);
  }
  return std::nullopt;
}

// The directory can disappear: a program that closes all of its descriptors drops the lock too. A program that has
// changed its user could not read the directory of the user before.
bool FileTree::ensure_directory() {
  struct stat info {};
  const bool exists = lock_fd_ >= 0 && user_id_ == ::geteuid() && ::lstat(root().c_str(), &info) == 0 &&
                      info.st_dev == root_device_ && info.st_ino == root_inode_;
  if (exists) return true;
  if (has_left_ || has_failed_) return false;
  close_lock();
  user_id_ = ::geteuid();
  return enter_directory();
}

// Takes the first name that no other user has.
bool FileTree::enter_directory() {
  constexpr int kNames = 10;
  constexpr int kAttempts = 10;  // another process may make or remove the directory between two steps
  int error = EEXIST;
  for (int number = 0; number < kNames; ++number) {
    const std::string name = file_tree_prefix() + name_ + (number == 0 ? "" : "-" + std::to_string(number));
    if (const std::string* const root = root_.load(std::memory_order_relaxed); root == nullptr || *root != name)
      root_.store(new std::string(name), std::memory_order_release);
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      error = join_directory();
      if (error == 0) return true;
      if (error == EPERM) break;
      if (error == ENOENT) error = make_directory();
      if (error != 0 && error != ENOENT && error != EEXIST && error != ENOTEMPTY) break;
    }
    if (error != EPERM) break;
  }
  report_failure(error);
  return false;
}

// EPERM: the name is another user's. ENOENT: there is no such directory any more.
int FileTree::join_directory() {
  struct stat named {};
  if (::lstat(root().c_str(), &named) != 0) return errno;
  if (named.st_uid != user_id_ || !S_ISDIR(named.st_mode)) return EPERM;
  const int opened = ::open(root().c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (opened < 0) return errno;
  const int high = ::fcntl(opened, F_DUPFD_CLOEXEC, kLowestFd);
  if (high >= 0) ::close(opened);
  UniqueFd fd(high < 0 ? opened : high);
  struct stat locked {};
  if (::flock(fd.get(), LOCK_SH) != 0 || ::fstat(fd.get(), &locked) != 0) return errno;
  if (::lstat(root().c_str(), &named) != 0) return errno;
  if (named.st_dev != locked.st_dev || named.st_ino != locked.st_ino) return ENOENT;
  lock_fd_ = fd.release();
  root_device_ = locked.st_dev;
  root_inode_ = locked.st_ino;
  return 0;
}

int FileTree::make_directory() const {
  remove_unused_file_trees();
  std::string made = root() + ".new." + kRandomPart;
  if (::mkdtemp(made.data()) == nullptr || ::chmod(made.c_str(), S_IRWXU) != 0) return errno;
  // Locked, so that no other process removes it as unused.
  const UniqueFd fd(::open(made.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const bool complete =
      fd && ::flock(fd.get(), LOCK_SH) == 0 && write_tree(tree_, made) && ::rename(made.c_str(), root().c_str()) == 0;
  const int error = complete ? 0 : errno;
  if (!complete) remove_directory(made);
  return error;
}

// It logs nothing here: libibverbs reports the settings.
void FileTree::report_failure(int error) {
  has_failed_ = true;
  const std::string prefix = file_tree_prefix();
  ::dprintf(
      STDERR_FILENO,
      "softverbs: pid %d sees no files of the devices in /dev and /sys: the directory %s* cannot be made: %s. Next: "
      "make /dev/shm writable with 2 MB of free space, and remove directories of other users with this name\n",
      static_cast<int>(::getpid()), (prefix + name_).c_str(), std::strerror(error));
}

// The program may have closed the descriptor and its number may be that of another file now.
void FileTree::close_lock() {
  struct stat info {};
  if (lock_fd_ >= 0 && ::fstat(lock_fd_, &info) == 0 && info.st_dev == root_device_ && info.st_ino == root_inode_)
    ::close(lock_fd_);
  lock_fd_ = -1;
}

void FileTree::leave() {
  if (pid_.load(std::memory_order_relaxed) != ::getpid()) return;
  const Use use(*this);
  if (use.is_nested()) return;
  has_left_ = true;
  if (lock_fd_ < 0) return;
  close_lock();
  // A forked child shares the open file and with it the lock, so only a new open file tells whether one is left.
  remove_file_tree_if_unused(root().c_str());
}

}  // namespace verbatim::softverbs
