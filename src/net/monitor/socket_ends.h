// Sockets of which the monitor reports that the peer has ended them: those of RMA, which are read by the calls of NCCL
// otherwise.
#pragma once

#include <map>

#include "base/mutex.h"
#include "base/result.h"
#include "net/monitor/poller.h"

namespace verbatim {

class SocketEndObserver {
 public:
  // The peer sends nothing more on the socket, or the connection has failed: called once, by the monitoring thread.
  virtual void socket_ended() noexcept = 0;

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

  // After it the observer is not called. To be called before the socket is closed, and not by the observer.
  void unwatch(int fd) VERBATIM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    if (observers_.erase(fd) != 0) poller_.remove(fd);
  }

  void report(int fd) VERBATIM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    const auto found = observers_.find(fd);
    if (found != observers_.end()) found->second->socket_ended();
  }

 private:
  const Poller& poller_;
  Mutex mutex_;
  std::map<int, SocketEndObserver*> observers_ VERBATIM_GUARDED_BY(mutex_);
};

}  // namespace verbatim
