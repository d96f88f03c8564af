// The connections that the monitor watches. Each part of the monitor keeps its state of a connection here.
#pragma once

#include <infiniband/verbs.h>
#include <netinet/in.h>

#include <array>
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
#include "channel/side_channel_source.h"
#include "net/monitor/stall_detector.h"
#include "net/transfer/comm.h"
#include "net/transfer/side_channel.h"
#include "runtime/deadlines.h"
#include "runtime/event_loop.h"

namespace verbatim {

class DeviceCalls;

// A side channel that has ended with an error, or lies on a lane that is down, and is made again (lost_channels.h).
struct LostChannel {
  // Close with a reset: `attempt`, and `offered`.
  void drop_attempt(const EventHandler& handler);
  void drop_offered();

  // Addresses of the peer, in the order in which they are tried.
  std::array<wire::Address, wire::kMaxAddresses + 1> targets;
  std::uint8_t target_count = 0;  // 0: this end cannot make it again
  bool moves = false;             // it has no error, but the peer does not answer, or it lies on a lane that is down

  int error = 0;
  bool reported = false;
  bool refused = false;  // the last attempt at the peer's first address: nothing listens there, or a firewall says so
  bool resume_sent = false;  // on `attempt`
  unsigned failed_attempts = 0;
  std::uint32_t answers = 0;  // Comm::probes_answered when the channel was lost
  std::uint64_t since_ns = 0;
  std::uint64_t unanswered_ns = 0;  // since when a probe is known to be outstanding, and nothing completes; 0: none is
  std::uint64_t completed = 0;      // changes when work of the comm completes or data of the peer arrives
  std::uint32_t polls = 0;          // Comm::polls_without_answer when the answer was overdue
  bool overdue = false;             // the answer to the probe
  bool comm_failed = false;         // `failed_attempts` counts from then on
  std::uint64_t check_ns = 0;       // when the answer is looked for
  std::uint64_t probe_ns = 0;       // when the comm gets an event again
  std::uint64_t attempt_ns = 0;     // when `attempt` is given up, or the next one begins
  UniqueFd attempt;                 // a TCP connection that may become the side channel
  UniqueFd offered;                 // one that the peer has made, of an end that prefers its own for a while
  std::uint64_t offered_ns = 0;     // when it is taken
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
  // Until it is false, the comm and this entry stay.
  bool has_calls() const { return calls_requested || calls_run; }
  bool send(const wire::Notice& notice) { return is_open() && channel.send(comm->side_channel(), notice); }
  bool send_ping();
  // Also while it moves: then the old side channel is used until the new one answers.
  bool is_open() const { return lost == nullptr || lost->moves; }
  // Sends this end's error to the peer; of a comm that has not failed: that its owner closed it with work outstanding.
  void send_failure_notice();
  // Reads `addresses`. A socket that has been reset has none any more.
  void find_addresses();
  // Ends the connection at both ends for a reason that the monitor has found.
  void fail(ErrorKind kind, const char* why);

  Comm* comm = nullptr;
  std::uint64_t number = 0;  // of the connections of the process, from 1, in the order in which they were made
  const void* owner = nullptr;
  SideChannel channel;
  // Together, because a connection's memory is limited.
  bool peer_closed = false;         // nothing more is read from the side channel
  bool failure_exchanged = false;   // a failure notice was sent or received
  bool failure_unsent = false;      // it could not be sent, and is sent later
  bool close_sent = false;          // graceful close
  bool no_answer = false;           // Keepalive has reported that the peer's host acknowledges nothing
  bool resumable = false;           // the source of side channels knows this connection
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

  std::unique_ptr<LostChannel> lost;  // while the side channel is lost
  struct Addresses {
    sockaddr_in6 own, peer;  // or sockaddr_in
  };
  std::unique_ptr<Addresses> addresses;  // of the side channel; nullptr: they are not known
  bool dialed =
      false;  // this end has made the side channel: the port of addresses->peer is that of the peer's listener
  std::uint32_t pings_sent = 0;      // on this side channel
  std::uint32_t pongs_received = 0;  // likewise
  std::uint32_t awaited_pongs = 0;   // by answer_due_ns
  std::uint64_t answer_due_ns = 0;   // when the peer's monitor is to have answered a notice about a lane; 0: no notice
  std::uint64_t channel_since_ns = 0;  // when the side channel was made again

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
  // The side channel is not lost any more, or is not made again.
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
  EventHandler handler;  // of side channels and LostChannel::attempt, by the keys of `connections`; and of what is due
  Mutex mutex;
  std::condition_variable_any changed;  // QP states were read, or a closed comm was destroyed
  Connections connections VERBATIM_GUARDED_BY(mutex);
  Deadlines<MonitoredConnection> deadlines VERBATIM_GUARDED_BY(mutex);  // 0: the connection has changed
  std::vector<Line> lines VERBATIM_GUARDED_BY(mutex);
  std::vector<EarlierFailures> earlier_failures VERBATIM_GUARDED_BY(mutex);
  std::vector<SocketInterface> interfaces VERBATIM_GUARDED_BY(mutex);  // of this process, for side channels
  // By owner: comms that are closing or being destroyed. An entry is made before the owner's first close, which must
  // not allocate.
  std::map<const void*, std::size_t> closing VERBATIM_GUARDED_BY(mutex);
  RmaSets* rma_sets = nullptr;  // of the same monitor; any thread, without the mutex
  SideChannelSource* source VERBATIM_GUARDED_BY(mutex) = nullptr;
  std::size_t resumable VERBATIM_GUARDED_BY(mutex) = 0;        // connections that the source knows
  std::size_t reported_losses VERBATIM_GUARDED_BY(mutex) = 0;  // side channels that are lost, and reported
  std::uint64_t connections_made VERBATIM_GUARDED_BY(mutex) = 0;
  std::size_t open_qp_state_requests VERBATIM_GUARDED_BY(mutex) = 0;
  std::uint64_t visits VERBATIM_GUARDED_BY(mutex) = 0;  // how often the monitor has looked at a connection
};

}  // namespace verbatim
