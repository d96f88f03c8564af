// The tree of files of this process as a directory in /dev/shm. All processes with the same settings share it: its name
// has a hash of its contents, and its contents never change. Each process that has used it holds a shared flock on it;
// the last one removes it, and a process that makes a tree removes those that killed processes have left.
#pragma once

#include <pthread.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "softverbs/files/host_observer.h"
#include "softverbs/files/tree.h"

namespace verbatim::softverbs {

// Thread-safe. While one of its functions runs, the same thread sees the files of the system.
class FileTree {
 public:
  static FileTree& instance();

  // Whether the path may be served: a cheap test without a lock or memory.
  static bool is_candidate(const char* path);

  // The file of the tree for a path without "//" and "/."; empty: the path is not served, or there is no directory for
  // the tree.
  std::string locate(std::string_view path);
  // The path that programs see for a path inside the directory; nullopt for others.
  std::optional<std::string_view> visible_path(std::string_view path) const;

  // The present content of a file whose content changes, by its path in the directory; nullopt for other files.
  std::optional<PortFile> read_port_file(const std::string& located);

  // Called when the process ends, possibly by a signal handler.
  void leave();

 private:
  class Use;

  FileTree() = default;
  void prepare();
  bool is_served(std::string_view path) const;
  const std::string& root() const { return *root_.load(std::memory_order_acquire); }
  bool ensure_directory();
  bool enter_directory();
  // Both return 0 or the error.
  int join_directory();
  int make_directory() const;
  void close_lock();
  void report_failure(int error);

  // Held across fork(), so that a child never finds it locked by a thread that it does not have.
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  std::atomic<pthread_t> user_{};
  bool prepared_ = false;
  bool has_left_ = false;
  bool has_failed_ = false;
  std::atomic<pid_t> pid_{::getpid()};  // not that of a child of vfork(), which runs in the memory of its parent
  std::optional<Settings> settings_;
  Tree tree_;
  std::string name_;                               // the hash
  std::atomic<const std::string*> root_{nullptr};  // read without the lock, so an old one is never freed
  uid_t user_id_ = 0;                              // who has made or joined the directory
  int lock_fd_ = -1;
  dev_t root_device_ = 0;
  ino_t root_inode_ = 0;
  std::unique_ptr<HostObserver> observer_;
};

}  // namespace verbatim::softverbs
