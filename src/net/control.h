// The control thread: the one thread of ours in a process. It waits, by epoll, for what nobody polls: asynchronous
// events of the devices, the side channels of connections, and the deadlines of those that are closing. It modifies no
// QP that a comm uses; what a comm must know it finds in its signal word.
//
//   watched --close in peace--> parked --peer's bye, end of file, deadline, or its communicator's abort--> destroyed
//
// Started with the first device, joined before the process state goes: NCCL unloads the library after that.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/result.h"
#include "base/socket.h"
#include "verbs/device.h"
#include "wire/handshake.h"

namespace verbatim {

class Comm;
class Context;

class ControlThread {
 public:
  // `devices` must outlive the thread.
  static Result<std::unique_ptr<ControlThread>> start(std::span<const std::unique_ptr<Device>> devices);
  // Joins the thread. Nothing may be watched or parked any more.
  ~ControlThread();
  ControlThread(const ControlThread&) = delete;
  ControlThread& operator=(const ControlThread&) = delete;

  // From now on `comm` hears of its devices' and its peer's events, until it is forgotten or parked.
  void watch(Comm& comm) VERBATIM_EXCLUDES(mutex_);
  void forget(Comm& comm) VERBATIM_EXCLUDES(mutex_);

  // Takes over a watched comm that its owner has closed in peace: tells the peer, and keeps the QPs alive until it has
  // closed too, at the latest for `timeout_ns`. Returns at once.
  void park(std::unique_ptr<Comm> comm, std::uint64_t timeout_ns) VERBATIM_EXCLUDES(mutex_);

  // Returns when nothing of `context` is parked any more. `at_once`: without waiting for any peer.
  void drain(const Context& context, bool at_once) VERBATIM_EXCLUDES(mutex_);

 private:
  struct Connection {
    Comm* comm = nullptr;
    std::unique_ptr<Comm> parked;  // set once the owner has closed it
    std::uint64_t deadline_ns = 0;
    OutgoingMessage bye;
    bool bye_sent = false;
    bool peer_closed = false;
    std::array<std::uint8_t, wire::kHeaderBytes> message{};
    std::size_t filled = 0;
  };
  // By the side channel's descriptor, which is also what epoll reports.
  using Connections = std::map<int, Connection>;

  explicit ControlThread(std::span<const std::unique_ptr<Device>> devices) : devices_(devices) {}

  void run();
  void wake() const;
  void hear_device(const Device& device) VERBATIM_EXCLUDES(mutex_);
  void hear_peer(Connection& connection) VERBATIM_REQUIRES(mutex_);
  // Parked comms that are over; they are destroyed outside the lock.
  std::vector<std::unique_ptr<Comm>> take_finished() VERBATIM_REQUIRES(mutex_);
  int milliseconds_to_next_deadline() VERBATIM_REQUIRES(mutex_);

  const std::span<const std::unique_ptr<Device>> devices_;
  UniqueFd epoll_;
  UniqueFd wake_;
  mutable Mutex mutex_;
  std::condition_variable_any changed_;  // something parked is gone
  Connections connections_ VERBATIM_GUARDED_BY(mutex_);
  std::map<const Context*, std::size_t> parked_ VERBATIM_GUARDED_BY(mutex_);
  bool stop_ VERBATIM_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace verbatim
