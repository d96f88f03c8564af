#include "net/monitor/monitor.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/socket.h"
#include "net/monitor/channel_losses.h"
#include "net/monitor/device_events.h"
#include "net/monitor/graceful_closes.h"
#include "net/monitor/peer_messages.h"
#include "runtime/worker.h"

namespace verbatim {
namespace {

constexpr std::uint64_t kSendRetryNs = 10 * kNanosecondsPerMillisecond;
// How soon the end of the last outstanding receive of an idle comm is seen.
constexpr std::uint64_t kLaneCheckNs = 5 * kNanosecondsPerMillisecond;
// How often the time that a connection waits for a lane is counted.
constexpr std::uint64_t kWaitCheckNs = kNanosecondsPerSecond / 4;
// For so long, or VERBATIM_RECONNECT_S if that is more, the ends of a connection wait for a side channel over which
// they agree what has arrived on a lane that has failed, while another one works.
constexpr unsigned kMinAgreementS = 60;
// A side channel that the peer has made again waits at most this long.
constexpr std::uint64_t kAcceptPeriodNs = kNanosecondsPerSecond;
// The listener accepts a limited number at a time: after some, others may wait.
constexpr std::uint64_t kNextAcceptNs = 10 * kNanosecondsPerMillisecond;
// While descriptors are missing, its sockets stay readable.
constexpr std::uint64_t kMinAcceptPeriodNs = 2 * kNanosecondsPerMillisecond;

}  // namespace

Result<std::unique_ptr<Monitor>> Monitor::start(std::span<const std::unique_ptr<Device>> devices,
                                                const MonitorSettings& settings) {
  std::unique_ptr<Monitor> monitor(new Monitor(devices, settings));
  if (const Status opened = monitor->open(settings); !opened) return opened.error();
  monitor->open_state_sockets(settings);
  const Status started = start_thread(monitor->thread_, "verbatim", [&loop = monitor->table_.loop] { loop.run(); });
  if (!started) return started.error();
  return monitor;
}

Monitor::Monitor(std::span<const std::unique_ptr<Device>> devices, const MonitorSettings& settings)
    : devices_(devices),
      table_([this] { return attend_all(); }),
      rma_sets_(table_.loop, settings.stalls),
      stall_reports_(settings.stalls),
      keepalive_(settings.keepalive_ns),
      listener_(
          table_.loop, [this](int) { listener_.call_at(last_accept_ns_ + kMinAcceptPeriodNs); },
          [this] { return accept_channels(); }) {
  table_.rma_sets = &rma_sets_;
}

Monitor::~Monitor() {
  if (!thread_.joinable()) return;
  table_.loop.stop();
  thread_.join();
}

Status Monitor::open(const MonitorSettings& settings) {
  if (const Status opened = table_.loop.open(); !opened) return opened.error();
  const MutexLock lock(table_.mutex);
  table_.earlier_failures.resize(devices_.size());
  table_.interfaces = settings.interfaces;
  for (std::uint32_t i = 0; i < devices_.size(); ++i) {
    const Device& device = *devices_[i];
    DeviceCalls& calls = device_calls_.try_emplace(DeviceSet{i}, table_, &device, i).first->second;
    if (const Status opened = open_device_events(device, calls.handler()); !opened) return opened.error();
  }
  return {};
}

// Without them the connections work: what fails is a warning.
void Monitor::open_state_sockets(const MonitorSettings& settings) {
  const auto open = [&](const std::string& path, const char* setting, bool queries_qps) {
    Result<std::unique_ptr<StateSocket>> opened =
        StateSocket::open({path, setting, queries_qps, settings.host}, table_, rma_sets_);
    if (opened) return state_sockets_.push_back(std::move(*opened));
    VERBATIM_WARN("no state can be read at %s (%s): %s: %s. Next: %s", path.c_str(), setting, opened.error().operation,
                  std::strerror(opened.error().sys_errno),
                  opened.error().sys_errno == EADDRINUSE ? "put %p in the path: each process needs its own"
                                                         : "name a short path that this process can write");
  };
  if (const std::optional<std::string> directory = make_state_directory(settings.state_directory)) {
    remove_dead_sockets(*directory);
    // Read every second or more often, which is too often for queries of all QPs.
    if (const std::optional<std::string> path = new_state_socket(*directory)) open(*path, "VERBATIM_STATE_DIR", false);
  }
  if (!settings.state_socket.empty()) open(settings.state_socket, "VERBATIM_STATE_SOCKET", true);
}

Status Monitor::watch(Comm& comm, const void* owner) {
  const Result<bool> ask_device = add(comm, owner);
  if (!ask_device) return ask_device.error();
  // query_qp runs without the lock. Later failures arrive as events for this comm.
  if (!*ask_device) return {};
  if (const Device* failed = comm.failed_device()) comm.set_device_event(IBV_EVENT_QP_FATAL, *failed);
  return {};
}

Result<bool> Monitor::add(Comm& comm, const void* owner) {
  const MutexLock lock(table_.mutex);
  DeviceSet used;
  bool ask_device = false;
  for (std::uint32_t i = 0; i < devices_.size(); ++i) {
    if (!comm.uses(*devices_[i])) continue;
    used.insert(i);
    if (table_.earlier_failures[i].device) comm.set_device_event(IBV_EVENT_DEVICE_FATAL, *devices_[i]);
    ask_device = ask_device || table_.earlier_failures[i].unowned_queue;
  }
  table_.closing.try_emplace(owner, 0);
  DeviceCalls& calls = device_calls_.try_emplace(used, table_, nullptr, 0U).first->second;
  const int fd = comm.channel().key();
  table_.deadlines.prepare();
  MonitoredConnection& connection = table_.connections[fd];
  connection.comm = &comm;
  if (const Status added = comm.channel().open(table_.process, {connection.end(), comm.endpoint().remote().addresses});
      !added) {
    table_.connections.erase(fd);
    VERBATIM_WARN("watching a connection failed: %s: %s%s", added.error().operation,
                  std::strerror(added.error().sys_errno),
                  added.error().sys_errno == ENOSPC ? ". Next: raise fs.epoll.max_user_watches" : "");
    return added.error();
  }
  connection.number = ++table_.connections_made;
  connection.owner = owner;
  connection.device_calls = &calls;
  comm.set_observer(this);
  // An event of before has come for other connections only.
  for (const Port* port : comm.endpoint().ports()) {
    const std::uint64_t now = monotonic_ns();
    if (port->device->history().link_since(port->port_num, now, now).down)
      comm.port_down(*port->device, port->port_num);
  }
  if (table_.listener != nullptr) {
    try {
      const bool is_first = table_.listener->add_connection(connection.end(), comm.channel().session(), fd);
      connection.resumable = true;
      if (is_first) serve_listener();
    } catch (...) {  // no memory: if the side channel is lost, it stays lost
    }
  }
  const std::uint64_t now = monotonic_ns();
  connection.stall_check_ns = stall_reports_.next_idle_check_ns(now);
  if (table_.connections.size() == 1) keepalive_.restart(now);
  table_.deadlines.add(connection, connection.stall_check_ns);
  table_.handler.call_at(std::min(connection.stall_check_ns, keepalive_.next_tick_ns()));
  return ask_device;
}

void Monitor::unwatch(Comm& comm) {
  const MutexLock lock(table_.mutex);
  comm.set_observer(nullptr);
  const auto found = table_.connections.find(comm.channel().key());
  if (found == table_.connections.end()) return;
  // Calls for other comms may take long: this one waits only for its own, if they have begun.
  for (DeviceCalls::withdraw(table_, found->second); found->second.has_calls();) {
    table_.changed.wait(table_.mutex);
    DeviceCalls::withdraw(table_, found->second);
  }
  found->second.send_failure_notice();
  table_.forget(found->second);
  table_.connections.erase(found);
}

void Monitor::close_gracefully(std::unique_ptr<Comm> comm, std::uint64_t timeout_ns) {
  const MutexLock lock(table_.mutex);
  MonitoredConnection& connection = table_.connections.find(comm->channel().key())->second;
  ++table_.closing.find(connection.owner)->second;
  connection.close_deadline_ns = monotonic_ns() + timeout_ns;
  connection.closing = std::move(comm);
  table_.mark_changed(connection);
}

void Monitor::drain(const void* owner, bool at_once) {
  const MutexLock lock(table_.mutex);
  for (auto& [fd, connection] : table_.connections) {
    if (!at_once || connection.closing == nullptr || connection.owner != owner) continue;
    connection.close_deadline_ns = 0;
    table_.mark_changed(connection);
  }
  const auto closing = table_.closing.find(owner);
  if (closing == table_.closing.end()) return;
  while (closing->second != 0) table_.changed.wait(table_.mutex);
  table_.closing.erase(closing);
}

void Monitor::comm_changed(Comm& comm) noexcept {
  const MutexLock lock(table_.mutex);
  if (MonitoredConnection* const connection = table_.find(comm.channel().key())) table_.mark_changed(*connection);
}

void Monitor::set_listener(Listener& listener) {
  const MutexLock lock(table_.mutex);
  table_.listener = &listener;
}

std::uint64_t Monitor::accept_channels() noexcept {
  Listener* listener = nullptr;
  {
    const MutexLock lock(table_.mutex);
    if (table_.listener == nullptr) return kNever;
    listener = table_.listener;
  }
  const std::uint64_t now = last_accept_ns_ = monotonic_ns();
  try {
    // Without the mutex: the listener may log.
    std::vector<Listener::Resumed> resumed =
        listener->take_resumed([this](int fd) { static_cast<void>(listener_.watch(fd, EventHandler::kReadableOnce)); });
    const MutexLock lock(table_.mutex);
    for (auto& [end, key, number, socket] : resumed) {
      MonitoredConnection* const connection = table_.find(key);
      if (connection == nullptr || !connection->resumable || connection->end() != end) continue;
      if (connection->peer_closed) continue;
      table_.mark_changed(*connection);
      channel_changed(table_, *connection,
                      connection->comm->channel().accept(std::move(socket), number, monotonic_ns()));
    }
    return listener->has_connections() ? now + (resumed.empty() ? kAcceptPeriodNs : kNextAcceptNs) : kNever;
  } catch (...) {  // no memory: the peers try again
    return now + kAcceptPeriodNs;
  }
}

std::uint64_t Monitor::visits() {
  const MutexLock lock(table_.mutex);
  return table_.visits;
}

std::uint64_t Monitor::attend_all() noexcept {
  std::uint64_t next = kNever;
  std::vector<ConnectionTable::Line> lines;
  {
    const MutexLock lock(table_.mutex);
    const std::uint64_t now = monotonic_ns();
    keepalive_.tick(table_, now);
    while (table_.deadlines.nearest_ns() <= now) attend(*table_.deadlines.nearest(), now);
    if (!table_.connections.empty()) next = std::min(keepalive_.next_tick_ns(), table_.deadlines.nearest_ns());
    for (auto& [devices, calls] : device_calls_) calls.start(table_);
    lines.swap(table_.lines);
  }
  for (const auto& socket : state_sockets_) socket->look_again();
  for (const auto& [level, text] : lines) log_line(level, __FILE__, __LINE__, "%s", text.c_str());
  // Connections with deadlines in the same millisecond are attended together.
  return next == kNever ? next : (next / kNanosecondsPerMillisecond + 1) * kNanosecondsPerMillisecond;
}

std::uint64_t Monitor::look_after_lanes(MonitoredConnection& connection, std::uint64_t now) {
  Comm& comm = *connection.comm;
  if (comm.failure_text() != nullptr) return kNever;
  const std::uint64_t due = comm.renewal_due_ns();
  if (due <= now) DeviceCalls::request_renewal(connection);
  std::uint64_t next = due <= now ? kNever : due;  // DeviceCalls makes the connection due
  if (comm.can_advance_for_idle()) {
    if (now >= connection.advance_due_ns) {
      DeviceCalls::request_advance(connection);
      connection.advance_due_ns = now + kLaneCheckNs;
    }
    next = std::min(next, connection.advance_due_ns);
  }
  next = std::min(next, comm.watch_lanes(now));
  const std::uint64_t waited_ns = comm.can_wait() ? comm.waited_ns(now) : 0;
  const LaneWait wait = comm.lane_wait();
  if (wait == LaneWait::kNone) return next;
  const bool has_lane = wait == LaneWait::kForAgreement;
  const unsigned reconnect_s = comm.settings().config.reconnect_s;
  const unsigned limit_s = has_lane ? std::max(reconnect_s, kMinAgreementS) : reconnect_s;
  const std::string& peer = comm.endpoint().peer_name();
  char why[256] = "";
  if (!has_lane && connection.no_answer && !comm.channel().may_be_made()) {
    std::snprintf(why, sizeof why, "no lane to the peer %s works, and its host acknowledges nothing", peer.c_str());
  } else if (waited_ns >= limit_s * kNanosecondsPerSecond && has_lane) {
    std::snprintf(why, sizeof why,
                  "a lane to the peer %s has failed, and no side channel to agree about it could be made within %u s",
                  peer.c_str(), limit_s);
  } else if (waited_ns >= limit_s * kNanosecondsPerSecond) {
    std::snprintf(why, sizeof why, "no lane to the peer %s has come back within %u s (VERBATIM_RECONNECT_S)",
                  peer.c_str(), limit_s);
  }
  if (*why == '\0') return std::min(next, now + kWaitCheckNs);
  connection.fail(ErrorKind::kRemote, why);
  return next;
}

void Monitor::attend(MonitoredConnection& connection, std::uint64_t now) {
  ++table_.visits;
  const bool closing = connection.closing != nullptr;
  if (!closing) stall_reports_.check(table_, connection, now);
  if (!advance_channel(table_, connection, now)) {
    handle_peer_end(table_, connection, CommEvent::kPeerDisconnected);
  }
  send_due_messages(table_, connection, now);
  if (closing && advance_close(table_, connection, now)) return;
  std::uint64_t next = kNever;
  if (closing && !connection.has_calls()) next = connection.close_deadline_ns;
  if (!closing && !connection.has_failed()) next = connection.stall_check_ns;
  if (connection.unanswered_query) next = std::min(next, connection.qp_state_deadline_ns);
  if (connection.lanes_change) next = std::min(next, now + kLaneCheckNs);
  if (!closing && !connection.peer_closed && !connection.failure_exchanged) {
    next = std::min(next, look_after_lanes(connection, now));
  }
  Channel& channel = connection.comm->channel();
  if (!closing) next = std::min(next, channel.expect_answer(now));
  next = std::min(next, channel.due_ns());
  if (connection.loss != nullptr) next = std::min({next, connection.loss->probe_ns, connection.loss->check_ns});
  const bool has_notice = !connection.peer_closed && !connection.failure_exchanged && channel.is_open() &&
                          connection.comm->has_lane_notice();
  const bool has_failure = connection.failure_waits && !connection.peer_closed;
  const bool waits = has_notice || has_failure || (closing && !connection.close_sent);  // for room, or memory
  if (!channel.flush() || waits) next = std::min(next, now + kSendRetryNs);
  table_.deadlines.set(connection, std::max(next, now + 1));  // later than `now`: the loop that calls this must end
}

}  // namespace verbatim
