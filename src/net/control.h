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

#include "base/fd.h"
#include "base/mutex.h"
#include "base/result.h"
#include "net/side_channel.h"
#include "net/stall.h"
#include "verbs/device.h"

namespace verbatim {

class Comm;
class Context;
class StateSocket;
enum class CommSignal : std::uint32_t;

struct ControlSettings {
  std::uint64_t keepalive_ns = 0;  // 0: silence is no error
  StallSettings stalls = {};
  std::string state_socket = {};  // path; empty: none
  std::string host = {};
};

class ControlThread {
 public:
  // `devices` must outlive the thread.
  static Result<std::unique_ptr<ControlThread>> start(std::span<const std::unique_ptr<Device>> devices,
                                                      const ControlSettings& settings = {});
  // Joins the thread. Nothing may be watched or parked any more.
  ~ControlThread();
  ControlThread(const ControlThread&) = delete;
  ControlThread& operator=(const ControlThread&) = delete;

  // From now on `comm` hears of its devices' and its peer's events, and of those of its devices that came before, until
  // it is forgotten or parked. A failure has been logged, and nothing is watched then.
  Status watch(Comm& comm) VERBATIM_EXCLUDES(mutex_);
  void forget(Comm& comm) VERBATIM_EXCLUDES(mutex_);

  // Takes over a watched comm that its owner has closed in peace: tells the peer, and keeps the QPs alive until it has
  // closed too, at the latest for `timeout_ns`. Returns at once.
  void park(std::unique_ptr<Comm> comm, std::uint64_t timeout_ns) VERBATIM_EXCLUDES(mutex_);

  // Returns when nothing of `context` is parked any more. `at_once`: without waiting for any peer.
  void drain(const Context& context, bool at_once) VERBATIM_EXCLUDES(mutex_);

  // A comm that is watched has failed. Any thread.
  void wake() const;

 private:
  // Who has been heard of just before a beat, and falls silent, is found at the last of as many from there: within the
  // time that is set. Beats are counted, not time, because a process that was stopped has heard nothing for that time
  // and yet may accuse nobody.
  static constexpr unsigned kBeats = 4;
  static constexpr unsigned kSilentBeats = kBeats - 1;

  struct Connection {
    Comm* comm = nullptr;
    SideChannel channel;
    std::unique_ptr<Comm> parked;  // set once the owner has closed it
    std::uint64_t deadline_ns = 0;
    bool bye_sent = false;
    bool peer_closed = false;
    bool failure_told = false;  // by either end to the other
    bool heard = true;          // since the last beat
    unsigned silent_beats = 0;
    StallWatch watch;
  };
  // "HOST (pid 4711)"; without allocating.
  struct PeerName {
    explicit PeerName(const Comm& comm);
    char text[96];
  };
  struct Report;
  // By the side channel's descriptor, which is also what epoll reports.
  using Connections = std::map<int, Connection>;

  ControlThread(std::span<const std::unique_ptr<Device>> devices, const ControlSettings& settings);

  // `may_have_failed`: a QP of nobody who was watched has failed before.
  Status begin_to_watch(Comm& comm, bool& may_have_failed) VERBATIM_EXCLUDES(mutex_);

  // What allocates here must do without: nobody could be told that memory ran out.
  void run() noexcept;
  void hear_device(std::size_t index) VERBATIM_EXCLUDES(mutex_);
  void tell(const ibv_async_event& event, std::size_t device) VERBATIM_REQUIRES(mutex_);
  void fail_device(std::size_t index) VERBATIM_REQUIRES(mutex_);
  // Says what an event means, once: a link that went down or came back, an address that connections lost.
  void report(const ibv_async_event& event, std::size_t device) VERBATIM_EXCLUDES(mutex_);
  void report_link_down(const Device& device, std::uint8_t port_num) VERBATIM_EXCLUDES(mutex_);
  void report_link_up(const Device& device, std::uint8_t port_num) VERBATIM_EXCLUDES(mutex_);
  void report_gids(const Device& device, std::uint8_t port_num) VERBATIM_EXCLUDES(mutex_);
  // Connections over that port; 0: over any.
  std::size_t count_users(const Device& device, std::uint8_t port_num) VERBATIM_EXCLUDES(mutex_);

  void hear_peer(Connection& connection) VERBATIM_REQUIRES(mutex_);
  void hear(Connection& connection, const SideChannel::Message& message) VERBATIM_REQUIRES(mutex_);
  void distrust(Connection& connection) VERBATIM_REQUIRES(mutex_);
  void end_of_peer(Connection& connection, CommSignal signal) VERBATIM_REQUIRES(mutex_);
  static void tell_failure(Connection& connection);
  // The connection ends at both ends, for a reason that this thread has found.
  static void condemn(Connection& connection, ErrorKind kind, const char* why);
  void tell_failures() VERBATIM_REQUIRES(mutex_);
  // Pings, and finds who has fallen silent.
  void beat(std::uint64_t now) VERBATIM_REQUIRES(mutex_);

  // Lets go of the lock while the device tells the states of QPs.
  wire::View view_of(const Connection& connection, std::uint64_t now) VERBATIM_REQUIRES(mutex_);
  void report_stalls() VERBATIM_EXCLUDES(mutex_);
  bool find_stall(Report& report) VERBATIM_EXCLUDES(mutex_);
  bool look_at(Connection& connection, std::uint64_t now, Report& report) VERBATIM_REQUIRES(mutex_);
  void open_state_socket();
  void serve_state() noexcept VERBATIM_EXCLUDES(mutex_);
  // Readers wait while there are no descriptors, and are asked in again a second later.
  void pause_state(int why) noexcept;
  void resume_state(std::uint64_t now) noexcept;
  std::string state_json() VERBATIM_EXCLUDES(mutex_);

  // Parked comms that are over; they are destroyed outside the lock.
  Connections take_finished() VERBATIM_REQUIRES(mutex_);
  int milliseconds_to_next_deadline() VERBATIM_REQUIRES(mutex_);

  const ControlSettings settings_;
  const std::span<const std::unique_ptr<Device>> devices_;
  UniqueFd epoll_;
  UniqueFd wake_;
  mutable Mutex mutex_;
  std::condition_variable_any changed_;  // something parked is gone, or asked_about_ is
  Connections connections_ VERBATIM_GUARDED_BY(mutex_);
  std::map<const Context*, std::size_t> parked_ VERBATIM_GUARDED_BY(mutex_);  // from a context's first watch to drain
  // A device may be slow to answer, or hang: only who forgets this comm waits for it then, and nobody else.
  const Comm* asked_about_ VERBATIM_GUARDED_BY(mutex_) = nullptr;
  // What comms that are still being made must hear of once they are watched.
  std::vector<bool> device_failed_ VERBATIM_GUARDED_BY(mutex_);
  bool unknown_failed_ VERBATIM_GUARDED_BY(mutex_) = false;  // a QP or CQ of nobody who is watched
  bool stop_ VERBATIM_GUARDED_BY(mutex_) = false;
  std::uint64_t next_beat_ns_ VERBATIM_GUARDED_BY(mutex_) = 0;
  std::uint64_t next_look_ns_ VERBATIM_GUARDED_BY(mutex_) = 0;
  int looked_at_ VERBATIM_GUARDED_BY(mutex_) = -1;
  bool someone_owes_ VERBATIM_GUARDED_BY(mutex_) = false;
  std::unique_ptr<StateSocket> state_socket_;
  std::uint64_t state_resumes_ns_ = 0;  // 0: readers are served
  std::thread thread_;
};

}  // namespace verbatim
