// The control thread: the one thread of ours in a process. It waits, by epoll, for what nobody polls: asynchronous
// events of the devices, the side channels of connections, and the deadlines of those that are closing. It modifies no
// QP that a comm uses; what a comm must know it finds in its signal word.
//
//   watched --close in peace--> parked --peer's bye, end of file, deadline, or its communicator's abort--> destroyed
//
// With the peers it speaks over the side channels (control_peer.cc): each end tells the other of its failure, and a
// peer that has fallen silent is an error. It looks on (control_stall.cc): what has stopped is reported, with who holds
// it up.
//
// Started with the first device, joined before the process state goes: NCCL unloads the library after that.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "net/monitor/stall_detector.h"
#include "net/transfer/comm_observer.h"
#include "net/transfer/side_channel.h"
#include "verbs/device.h"

namespace verbatim {

class Comm;
class StateSocket;
enum class CommSignal : std::uint32_t;

struct MonitorSettings {
  std::uint64_t keepalive_ns = 0;  // 0: silence is no error
  StallSettings stalls = {};
  std::string state_socket = {};  // path; empty: none
  std::string host = {};
};

class Monitor final : public CommObserver {
 public:
  // `devices` must outlive the thread.
  static Result<std::unique_ptr<Monitor>> start(std::span<const std::unique_ptr<Device>> devices,
                                                const MonitorSettings& settings = {});
  // Joins the thread. Nothing may be watched or parked any more.
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  // From now on `comm` hears of its devices' and its peer's events, and of those of its devices that came before, until
  // it is forgotten or parked. A failure has been logged, and nothing is watched then. `owner`: an opaque key for
  // drain.
  Status watch(Comm& comm, const void* owner) VERBATIM_EXCLUDES(mutex_);
  void unwatch(Comm& comm) VERBATIM_EXCLUDES(mutex_);

  // Takes over a watched comm that its owner has closed in peace: tells the peer, and keeps the QPs alive until it has
  // closed too, at the latest for `timeout_ns`. Returns at once.
  void close_gracefully(std::unique_ptr<Comm> comm, std::uint64_t timeout_ns) VERBATIM_EXCLUDES(mutex_);

  // Returns when no comm of `owner` is closing any more. `at_once`: without waiting for any peer.
  void drain(const void* owner, bool at_once) VERBATIM_EXCLUDES(mutex_);

  void comm_failed(Comm&) noexcept override { wake(); }

 private:
  void wake() const;

  // Who has been heard of just before a beat, and falls silent, is found at the last of as many from there: within the
  // time that is set. Beats are counted, not time, because a process that was stopped has heard nothing for that time
  // and yet may accuse nobody.
  static constexpr unsigned kTicksPerTimeout = 4;
  static constexpr unsigned kMissedTicks = kTicksPerTimeout - 1;

  struct Connection {
    Comm* comm = nullptr;
    const void* owner = nullptr;
    SideChannel channel;
    std::unique_ptr<Comm> closing;  // set once the owner has closed it
    std::uint64_t deadline_ns = 0;
    bool close_sent = false;
    bool peer_closed = false;
    bool failure_exchanged = false;   // by either end to the other
    bool received_since_tick = true;  // since the last beat
    unsigned missed_ticks = 0;
    StallDetector stall_detector;
  };
  // "HOST (pid 4711)"; without allocating.
  struct PeerName {
    explicit PeerName(const Comm& comm);
    char text[96];
  };
  struct StallReport;
  // By the side channel's descriptor, which is also what epoll reports.
  using Connections = std::map<int, Connection>;

  Monitor(std::span<const std::unique_ptr<Device>> devices, const MonitorSettings& settings);

  // `may_have_failed`: a QP of nobody who was watched has failed before.
  Status register_comm(Comm& comm, const void* owner, bool& may_have_failed) VERBATIM_EXCLUDES(mutex_);

  // What allocates here must do without: nobody could be told that memory ran out.
  void run() noexcept;
  void read_device_events(std::size_t index) VERBATIM_EXCLUDES(mutex_);
  void dispatch_event(const ibv_async_event& event, std::size_t device) VERBATIM_REQUIRES(mutex_);
  void fail_device(std::size_t index) VERBATIM_REQUIRES(mutex_);
  // Says what an event means, once: a link that went down or came back, an address that connections lost.
  void log_event(const ibv_async_event& event, std::size_t device) VERBATIM_EXCLUDES(mutex_);
  void report_link_down(const Device& device, std::uint8_t port_num) VERBATIM_EXCLUDES(mutex_);
  void report_link_up(const Device& device, std::uint8_t port_num) VERBATIM_EXCLUDES(mutex_);
  void report_gids(const Device& device, std::uint8_t port_num) VERBATIM_EXCLUDES(mutex_);
  // Connections over that port; 0: over any.
  std::size_t count_connections(const Device& device, std::uint8_t port_num) VERBATIM_EXCLUDES(mutex_);

  void read_messages(Connection& connection) VERBATIM_REQUIRES(mutex_);
  void handle_message(Connection& connection, const SideChannel::Message& message) VERBATIM_REQUIRES(mutex_);
  void handle_protocol_error(Connection& connection) VERBATIM_REQUIRES(mutex_);
  void handle_peer_end(Connection& connection, CommSignal signal) VERBATIM_REQUIRES(mutex_);
  static void send_failure_notice(Connection& connection);
  // The connection ends at both ends, for a reason that this thread has found.
  static void fail_connection(Connection& connection, ErrorKind kind, const char* why);
  void send_failure_notices() VERBATIM_REQUIRES(mutex_);
  // Pings, and finds who has fallen silent.
  void keepalive_tick(std::uint64_t now) VERBATIM_REQUIRES(mutex_);

  // Lets go of the lock while the device tells the states of QPs.
  wire::ConnectionStatus connection_status(const Connection& connection, std::uint64_t now) VERBATIM_REQUIRES(mutex_);
  void report_stalls() VERBATIM_EXCLUDES(mutex_);
  bool next_stall_report(StallReport& report) VERBATIM_EXCLUDES(mutex_);
  bool check_connection(Connection& connection, std::uint64_t now, StallReport& report) VERBATIM_REQUIRES(mutex_);
  void open_state_socket();
  void serve_state() noexcept VERBATIM_EXCLUDES(mutex_);
  // Readers wait while there are no descriptors, and are asked in again a second later.
  void pause_state_socket(int why) noexcept;
  void resume_state_socket(std::uint64_t now) noexcept;
  std::string state_json() VERBATIM_EXCLUDES(mutex_);

  // Parked comms that are over; they are destroyed outside the lock.
  Connections take_closed() VERBATIM_REQUIRES(mutex_);
  int milliseconds_to_next_deadline() VERBATIM_REQUIRES(mutex_);

  const MonitorSettings settings_;
  const std::span<const std::unique_ptr<Device>> devices_;
  UniqueFd epoll_;
  UniqueFd wake_;
  mutable Mutex mutex_;
  std::condition_variable_any closing_changed_;  // something parked is gone, or asked_about_ is
  Connections connections_ VERBATIM_GUARDED_BY(mutex_);
  std::map<const void*, std::size_t> closing_counts_
      VERBATIM_GUARDED_BY(mutex_);  // from an owner's first watch to drain
  // A device may be slow to answer, or hang: only who forgets this comm waits for it then, and nobody else.
  const Comm* queried_comm_ VERBATIM_GUARDED_BY(mutex_) = nullptr;
  // What comms that are still being made must hear of once they are watched.
  std::vector<bool> device_failed_ VERBATIM_GUARDED_BY(mutex_);
  bool unowned_queue_failed_ VERBATIM_GUARDED_BY(mutex_) = false;  // a QP or CQ of nobody who is watched
  bool stop_ VERBATIM_GUARDED_BY(mutex_) = false;
  std::uint64_t next_tick_ns_ VERBATIM_GUARDED_BY(mutex_) = 0;
  std::uint64_t next_stall_check_ns_ VERBATIM_GUARDED_BY(mutex_) = 0;
  int last_checked_fd_ VERBATIM_GUARDED_BY(mutex_) = -1;
  bool any_outstanding_ VERBATIM_GUARDED_BY(mutex_) = false;
  std::unique_ptr<StateSocket> state_socket_;
  std::uint64_t state_resumes_ns_ = 0;  // 0: readers are served
  std::thread thread_;
};

}  // namespace verbatim
