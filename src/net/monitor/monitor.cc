#include "net/monitor/monitor.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstring>
#include <limits>
#include <new>
#include <system_error>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "net/monitor/state_socket.h"
#include "net/transfer/comm.h"

namespace verbatim {
namespace {

constexpr int kMaxEpollEvents = 32;
// epoll's user data tells descriptors of connections from the rest.
constexpr std::uint64_t kWakeMark = std::uint64_t{1} << 32;
constexpr std::uint64_t kDeviceMark = std::uint64_t{2} << 32;
constexpr std::uint64_t kStateMark = std::uint64_t{3} << 32;
constexpr std::uint64_t kLowMask = 0xffffffff;
constexpr int kSendRetryMs = 10;
constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

Status add_to_epoll(const UniqueFd& epoll, int fd, std::uint64_t mark) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = mark;
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) return system_error("epoll_ctl", errno);
  return {};
}

}  // namespace

Result<std::unique_ptr<Monitor>> Monitor::start(std::span<const std::unique_ptr<Device>> devices,
                                                const MonitorSettings& settings) {
  std::unique_ptr<Monitor> monitor(new Monitor(devices, settings));
  monitor->epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!monitor->epoll_) return system_error("epoll_create1", errno);
  monitor->wake_ = UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!monitor->wake_) return system_error("eventfd", errno);
  if (const Status added = add_to_epoll(monitor->epoll_, monitor->wake_.get(), kWakeMark); !added) return added.error();
  for (std::size_t i = 0; i < devices.size(); ++i) {
    const int fd = devices[i]->context()->async_fd;
    const int flags = ::fcntl(fd, F_GETFL);
    if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) return system_error("fcntl", errno);
    if (const Status added = add_to_epoll(monitor->epoll_, fd, kDeviceMark | i); !added) return added.error();
  }
  monitor->open_state_socket();
  monitor->resume_state_socket(monotonic_ns());
  // The thread inherits the mask: no signal of the application may be handled on it.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Status started;
  try {
    monitor->thread_ = std::thread([raw = monitor.get()] { raw->run(); });
  } catch (const std::system_error& error) {
    started = system_error("pthread_create", error.code().value());
  } catch (const std::bad_alloc&) {
    started = system_error("pthread_create", ENOMEM);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!started) return started.error();
  return monitor;
}

Monitor::Monitor(std::span<const std::unique_ptr<Device>> devices, const MonitorSettings& settings)
    : settings_(settings), devices_(devices), device_failed_(devices.size()) {}

Monitor::~Monitor() {
  if (!thread_.joinable()) return;
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  wake();
  thread_.join();
}

void Monitor::wake() const {
  const std::uint64_t one = 1;
  // Fails for good only when the counter is full, and then the thread is awake.
  while (::write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) continue;
}

Status Monitor::watch(Comm& comm, const void* owner) {
  bool may_have_failed = false;
  if (Status begun = register_comm(comm, owner, may_have_failed); !begun) return begun;
  // Asked without the lock. What fails from now on is known to be this comm's.
  if (may_have_failed && !comm.qps_usable()) comm.set_signal(IBV_EVENT_QP_FATAL);
  return {};
}

Status Monitor::register_comm(Comm& comm, const void* owner, bool& may_have_failed) {
  const MutexLock lock(mutex_);
  closing_counts_.try_emplace(owner, 0);
  const int fd = comm.side_channel().get();
  Connection& connection = connections_[fd];
  connection.comm = &comm;
  connection.owner = owner;
  if (Status added = add_to_epoll(epoll_, fd, static_cast<std::uint64_t>(fd)); !added) {
    connections_.erase(fd);
    VERBATIM_WARN("watching a connection failed: %s: %s%s", added.error().operation,
                  std::strerror(added.error().sys_errno),
                  added.error().sys_errno == ENOSPC ? " (fs.epoll.max_user_watches limits it)" : "");
    return added;
  }
  comm.set_observer(this);
  if (connections_.size() == 1) {  // the beats begin, the first of them not at once: the connection is alive
    next_tick_ns_ = monotonic_ns() + settings_.keepalive_ns / kTicksPerTimeout;
    wake();
  }
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    if (device_failed_[i] && comm.uses(*devices_[i])) comm.set_signal(IBV_EVENT_DEVICE_FATAL);
  }
  may_have_failed = unowned_queue_failed_;
  return {};
}

void Monitor::unwatch(Comm& comm) {
  const MutexLock lock(mutex_);
  while (queried_comm_ == &comm) closing_changed_.wait(mutex_);
  const int fd = comm.side_channel().get();
  comm.set_observer(nullptr);
  const auto found = connections_.find(fd);
  if (found == connections_.end()) return;
  send_failure_notice(found->second);
  static_cast<void>(::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr));
  connections_.erase(found);
}

void Monitor::close_gracefully(std::unique_ptr<Comm> comm, std::uint64_t timeout_ns) {
  {
    const MutexLock lock(mutex_);
    Connection& connection = connections_.find(comm->side_channel().get())->second;
    ++closing_counts_.find(connection.owner)->second;
    connection.deadline_ns = monotonic_ns() + timeout_ns;
    connection.closing = std::move(comm);
  }
  wake();
}

void Monitor::drain(const void* owner, bool at_once) {
  mutex_.lock();
  if (at_once) {
    for (auto& [fd, connection] : connections_) {
      if (connection.closing != nullptr && connection.owner == owner) connection.deadline_ns = 0;
    }
    wake();
  }
  if (const auto own = closing_counts_.find(owner); own != closing_counts_.end()) {
    while (own->second != 0) closing_changed_.wait(mutex_);
    closing_counts_.erase(own);
  }
  mutex_.unlock();
}

void Monitor::run() noexcept {
  ::pthread_setname_np(::pthread_self(), "verbatim");
  int timeout_ms = 0;  // the first time, whatever could not be begun may be
  while (true) {
    epoll_event events[kMaxEpollEvents];
    const int count = ::epoll_wait(epoll_.get(), events, kMaxEpollEvents, timeout_ms);
    for (int i = 0; i < count; ++i) {
      const std::uint64_t mark = events[i].data.u64;
      if (mark == kWakeMark) {
        std::uint64_t wakes = 0;
        static_cast<void>(!::read(wake_.get(), &wakes, sizeof wakes));
      } else if ((mark & ~kLowMask) == kDeviceMark) {
        read_device_events(mark & kLowMask);
      } else if (mark == kStateMark) {
        serve_state();
      } else {
        const MutexLock lock(mutex_);
        const auto found = connections_.find(static_cast<int>(mark));
        if (found != connections_.end()) read_messages(found->second);
      }
    }
    report_stalls();
    resume_state_socket(monotonic_ns());
    const bool all_sent = state_socket_ == nullptr || state_socket_->flush(monotonic_ns());
    Connections finished;
    {
      const MutexLock lock(mutex_);
      if (stop_) return;
      send_failure_notices();
      keepalive_tick(monotonic_ns());
      finished = take_closed();
      timeout_ms = milliseconds_to_next_deadline();
      if (!all_sent) timeout_ms = kSendRetryMs;
    }
    for (auto& [fd, connection] : finished) {
      connection.closing.reset();
      const MutexLock lock(mutex_);
      --closing_counts_.find(connection.owner)->second;
      closing_changed_.notify_all();
    }
  }
}

void Monitor::pause_state_socket(int why) noexcept {
  VERBATIM_INFO("the state cannot be read at %s (VERBATIM_STATE_SOCKET) for the moment: %s",
                settings_.state_socket.c_str(), std::strerror(why));
  static_cast<void>(::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, state_socket_->listener().get(), nullptr));
  state_resumes_ns_ = monotonic_ns() + kNanosecondsPerSecond;
}

// epoll may lack memory, too: then another second passes.
void Monitor::resume_state_socket(std::uint64_t now) noexcept {
  if (state_resumes_ns_ == 0 || now < state_resumes_ns_) return;
  const Status added = add_to_epoll(epoll_, state_socket_->listener().get(), kStateMark);
  state_resumes_ns_ = added ? 0 : now + kNanosecondsPerSecond;
}

Monitor::Connections Monitor::take_closed() {
  Connections finished;
  const std::uint64_t now = monotonic_ns();
  for (auto at = connections_.begin(); at != connections_.end();) {
    Connection& connection = at->second;
    if (connection.closing != nullptr && !connection.close_sent) {
      connection.close_sent = connection.channel.send(connection.closing->side_channel(),
                                                      wire::Notice::without_body(wire::MessageType::kClose));
    }
    const bool over =
        connection.peer_closed && connection.close_sent && connection.channel.flush(connection.comm->side_channel());
    if (connection.closing == nullptr || (!over && now < connection.deadline_ns)) {
      ++at;
      continue;
    }
    static_cast<void>(::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, at->first, nullptr));
    finished.insert(connections_.extract(at++));
  }
  return finished;
}

int Monitor::milliseconds_to_next_deadline() {
  const std::uint64_t now = monotonic_ns();
  std::uint64_t nearest = connections_.empty() ? kNever : std::min(next_tick_ns_, next_stall_check_ns_);
  if (state_resumes_ns_ != 0) nearest = std::min(nearest, state_resumes_ns_);
  for (auto& [fd, connection] : connections_) {
    if (connection.closing != nullptr) nearest = std::min(nearest, connection.deadline_ns);
    if (!connection.channel.flush(connection.comm->side_channel()) ||
        (connection.closing != nullptr && !connection.close_sent)) {
      nearest = std::min(nearest, now + kSendRetryMs * kNanosecondsPerMillisecond);
    }
  }
  if (nearest == kNever) return -1;
  if (nearest <= now) return 0;
  const std::uint64_t milliseconds = (nearest - now) / kNanosecondsPerMillisecond + 1;
  return static_cast<int>(std::min<std::uint64_t>(milliseconds, INT_MAX));
}

}  // namespace verbatim
