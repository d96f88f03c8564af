// The connections that the monitor watches. Each part of the monitor keeps its state of a connection here.
#pragma once

#include <infiniband/verbs.h>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"
#include "base/socket_interface.h"
#include "channel/channel.h"
#include "channel/listener.h"
#include "net/monitor/stall_detector.h"
#include "net/transfer/comm.h"
#include "runtime/deadlines.h"
#include "runtime/event_loop.h"

namespace verbatim {

class DeviceCalls;

// While the side channel is lost (channel_losses.h).
struct ChannelLoss {
  int error = 0;  // with which it has ended
  bool reported = false;
  bool overdue = false;       // the answer to the probe
  unsigned refusals = 0;      // Channel::refusals, as last read
  std::uint32_t answers = 0;  // Comm::probes_answered when the channel was lost
  std::uint32_t polls = 0;    // Comm::polls_without_answer when the answer was overdue
  std::uint64_t since_ns = 0;
  std::uint64_t unanswered_ns = 0;  // since when a probe is known to be outstanding, and nothing completes; 0: none is
  std::uint64_t completed = 0;      // changes when work of the comm completes or data of the peer arrives
  std::uint64_t check_ns = 0;       // when the answer is looked for
  std::uint64_t probe_ns = 0;       // when the comm gets an event again
};

// Everything here is used under the table's mutex. No function that holds it calls a verb that may hang.
struct MonitoredConnection {
  // Half of the time that a peer waits for a status reply.
  static constexpr std::uint64_t kQpStateTimeoutNs = StallDetector::kReplyTimeoutNs / 2;

  // By which the peer makes the side channel again.
  wire::ConnectionEnd end() const;
  // This end's status; the QP state is IBV_QPS_UNKNOWN while the device is being asked for it.
  wire::ConnectionStatus status(std::uint64_t now) const;
  // Whether it is too early to give up waiting for the QP states.
  bool awaits_qp_state(std::uint64_t now) const { return qp_state_requested && now < qp_state_deadline_ns; }
  bool has_failed() const { return failure_exchanged || comm->failure_text() != nullptr; }
  // Until it is false, the comm and this entry stay.
  bool has_calls() const { return calls_requested || calls_run; }
  bool send(const wire::Notice& notice) { return comm->channel().send(notice); }
  void exchange_failure(const wire::Notice& notice);
  // Sends this end's error to the peer; of a comm that has not failed: that its owner closed it with work outstanding.
  void send_failure_notice();
  // Ends the connection at both ends for a reason that the monitor has found.
  void fail(ErrorKind kind, const char* why);

  Comm* comm = nullptr;
  std::uint64_t number = 0;  // of the connections of the process, from 1, in the order in which they were made
  const void* owner = nullptr;
  // Together, because a connection's memory is limited.
  bool peer_closed = false;        // nothing more is read from the side channel
  bool failure_exchanged = false;  // a failure notice was sent or received, or is to be sent
  bool failure_sent = false;
  bool failure_waits = false;       // there was no memory to send it
  bool close_sent = false;          // graceful close
  bool no_answer = false;           // Keepalive has reported that the peer's host acknowledges nothing
  bool resumable = false;           // the listener knows this connection
  bool qp_state_requested = false;  // below
  bool renewal_requested = false;   // Comm::renew_lanes
  bool advance_requested = false;   // Comm::advance_for_idle
  bool calls_requested = false;     // the connection is in the list of its DeviceCalls,
  bool calls_run = false;           // or DeviceCalls makes its calls
  bool lanes_change = false;        // Comm::advance_lanes_for_idle

  // Of ConnectionTable::deadlines.
  std::uint32_t heap_index = 0;
  std::uint64_t deadline_ns = 0;

  // Graceful close.
  std::unique_ptr<Comm> closing;  // `comm`, once its owner has closed it
  std::uint64_t close_deadline_ns = 0;

  std::uint64_t advance_due_ns = 0;         // when Comm::advance_for_idle is to be called again
  std::uint64_t peer_progress = 0;          // of the comm, as last read
  unsigned ticks_without_message = 0;       // of Keepalive, and without progress of RDMA
  ibv_qp_state qp_state = IBV_QPS_UNKNOWN;  // as last read

  std::unique_ptr<ChannelLoss> loss;  // while the side channel is lost

  StallDetector stall_detector;
  std::uint64_t stall_check_ns = 0;               // when it is due
  std::optional<std::uint32_t> unanswered_query;  // id of the peer's status query
  bool query_is_new = false;                      // for it the QP states were not requested yet

  // The states of the QPs. DeviceCalls reads them; until it has, the entry stays in the table.
  DeviceCalls* device_calls = nullptr;
  MonitoredConnection* next_request = nullptr;
  std::uint64_t qp_state_deadline_ns = 0;
};

// The monitor looks at a connection only when it has changed or when its deadline has come: a wake-up costs nothing for
// the others. Only ticks of the keepalive visit all connections.
class RmaSets;

struct ConnectionTable {
  // By the descriptor of the side channel.
  using Connections = std::map<int, MonitoredConnection>;
  // What a comm must learn that is watched after a failure. One for each device.
  struct EarlierFailures {
    bool device = false;
    bool unowned_queue = false;  // a QP or CQ of the device, of no watched comm
  };

  // `attend` does what is due.
  explicit ConnectionTable(EventHandler::Due attend);

  // nullptr: it is closed.
  MonitoredConnection* find(int key) VERBATIM_REQUIRES(mutex);
  // The monitor looks at the connection at once.
  void mark_changed(MonitoredConnection& connection) VERBATIM_REQUIRES(mutex) {
    deadlines.set(connection, 0);
    handler.call_at(0);
  }
  // The connection ends: its descriptor is no longer polled, and its side channel is not made again. The caller removes
  // it from `connections`.
  void forget(MonitoredConnection& connection) VERBATIM_REQUIRES(mutex);
  // The side channel is no longer read, nor made again.
  void stop_channel(MonitoredConnection& connection) VERBATIM_REQUIRES(mutex);
  void end_loss(MonitoredConnection& connection) VERBATIM_REQUIRES(mutex);
  // The monitor logs the line without the mutex. `make` returns its text. Without memory there is no line.
  template <typename Make>
  void log(LogLevel level, Make make) noexcept VERBATIM_REQUIRES(mutex) {
    try {
      lines.push_back({level, make()});
    } catch (...) {
    }
  }

  struct Line {
    LogLevel level;
    std::string text;
  };

  EventLoop loop;
  EventHandler handler;                     // of side channels, by the keys of `connections`; and of what is due
  std::vector<SocketInterface> interfaces;  // of this process, for side channels; before the loop runs
  const Channel::Process process{handler, interfaces};
  Mutex mutex;
  std::condition_variable_any changed;  // QP states were read, or a closed comm was destroyed
  Connections connections VERBATIM_GUARDED_BY(mutex);
  Deadlines<MonitoredConnection> deadlines VERBATIM_GUARDED_BY(mutex);  // 0: the connection has changed
  std::vector<Line> lines VERBATIM_GUARDED_BY(mutex);
  std::vector<EarlierFailures> earlier_failures VERBATIM_GUARDED_BY(mutex);
  struct StalledPeer {
    StallCause cause = StallCause::kNone;
    std::uint64_t known_until_ns = 0;
  };
  std::map<std::pair<CommKind, std::string>, StalledPeer> stalled_peers VERBATIM_GUARDED_BY(mutex);
  // By owner: comms that are closing or being destroyed. An entry is made before the owner's first close, which must
  // not allocate.
  std::map<const void*, std::size_t> closing VERBATIM_GUARDED_BY(mutex);
  RmaSets* rma_sets = nullptr;  // of the same monitor; any thread, without the mutex
  Listener* listener VERBATIM_GUARDED_BY(mutex) = nullptr;
  std::size_t reported_losses VERBATIM_GUARDED_BY(mutex) = 0;  // side channels that are lost, and reported
  std::uint64_t connections_made VERBATIM_GUARDED_BY(mutex) = 0;
  std::size_t open_qp_state_requests VERBATIM_GUARDED_BY(mutex) = 0;
  std::uint64_t visits VERBATIM_GUARDED_BY(mutex) = 0;  // how often the monitor has looked at a connection
};

}  // namespace verbatim
