// The sockets of RMA. The monitor reports that the peer has ended one; messages are read by the calls of NCCL
// otherwise, or are reported too where peers send some at any time.
#pragma once

#include <map>
#include <set>

#include "base/mutex.h"
#include "base/result.h"
#include "net/monitor/poller.h"

namespace verbatim {

class SocketEndObserver {
 public:
  // The peer sends nothing more on the socket, or the connection has failed: called once, by the monitoring thread.
  // Also called for each message if they are watched.
  virtual void socket_ready() noexcept = 0;
  // Whether more can come.
  virtual bool socket_is_open() const noexcept = 0;

 protected:
  ~SocketEndObserver() = default;
};

// Owned by the monitor. Any thread.
class SocketEnds {
 public:
  explicit SocketEnds(const Poller& poller) : poller_(poller) {}

  // `observer` must outlive the call of unwatch.
  Status watch(int fd, SocketEndObserver& observer) VERBATIM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    observers_[fd] = &observer;
    const Status added = poller_.add_end(fd, PollSource::kSocketEnd, static_cast<std::uint32_t>(fd));
    if (!added) observers_.erase(fd);
    return added;
  }

  // From now on also messages are reported.
  void watch_messages(int fd) VERBATIM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    if (observers_.count(fd) == 0) return;
    with_messages_.insert(fd);
    rearm(fd);
  }

  // After it the observer is not called. To be called before the socket is closed, and not by the observer.
  void unwatch(int fd) VERBATIM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    with_messages_.erase(fd);
    if (observers_.erase(fd) != 0) poller_.remove(fd);
  }

  void report(int fd) VERBATIM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    const auto found = observers_.find(fd);
    if (found == observers_.end()) return;
    found->second->socket_ready();
    if (with_messages_.count(fd) != 0 && found->second->socket_is_open()) rearm(fd);
  }

 private:
  void rearm(int fd) const {
    static_cast<void>(poller_.rearm(fd, PollSource::kSocketEnd, static_cast<std::uint32_t>(fd)));
  }

  const Poller& poller_;
  Mutex mutex_;
  std::map<int, SocketEndObserver*> observers_ VERBATIM_GUARDED_BY(mutex_);
  std::set<int> with_messages_ VERBATIM_GUARDED_BY(mutex_);
};

}  // namespace verbatim
