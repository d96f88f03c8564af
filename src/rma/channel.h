// The TCP connections to one other rank: collective calls send and receive messages on them, and their end says that
// the other rank has closed, failed or died. There is one; where ranks have several ports, there may be one for each
// further network interface (further_connections.h). Then each message goes over all of them, and the first copy
// counts, so that messages arrive while any of them works. Any thread: the calls of NCCL, and the monitor when the
// connection ends.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "wire/rma.h"

namespace verbatim::rma {

class Channel {
 public:
  // kClosed: the rank has closed, nothing more comes. kFailed: it has sent why its communicator failed. kLost: the
  // connection ended without either.
  enum class End : std::uint8_t { kOpen, kClosed, kFailed, kLost };

  explicit Channel(UniqueFd socket);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // Of the first connection.
  int fd() const { return first_fd_; }
  // -1: it has failed, and others go on.
  int open_fd() const { return first_works_.load() ? first_fd_ : -1; }
  // Of all connections, also those that have failed.
  std::vector<int> fds() const VERBATIM_EXCLUDES(mutex_);
  // Of a connection: it has not failed.
  bool works(int fd) const VERBATIM_EXCLUDES(mutex_);
  // A further connection, on which nothing was sent yet.
  void add(UniqueFd socket) VERBATIM_EXCLUDES(mutex_);

  // Puts a message behind those that are not sent yet, and sends what the sockets accept.
  void send(const std::vector<std::uint8_t>& message) VERBATIM_EXCLUDES(mutex_);
  // Sends what the sockets accept. True: one of them has accepted all. When all have failed, the connection ends.
  bool flush() VERBATIM_EXCLUDES(mutex_);
  // The same as send; then waits until a socket has accepted all, or `stops` is set.
  void send_all(const std::vector<std::uint8_t>& message, const std::atomic<bool>& stops) VERBATIM_EXCLUDES(mutex_);
  // Sends a last message if the sockets accept it at once; the other rank reads the end of the connection behind it.
  // Nothing is sent after the first such message.
  void send_last(const std::vector<std::uint8_t>& message) VERBATIM_EXCLUDES(mutex_);

  // Nothing more is taken from the other rank: it has sent what a rank does not send.
  void give_up(std::string reason) VERBATIM_EXCLUDES(mutex_);

  // Reads what has arrived.
  void receive() VERBATIM_EXCLUDES(mutex_);
  // The next message about a lane that was received.
  std::optional<wire::RmaLane> take_lane() VERBATIM_EXCLUDES(mutex_);
  // The next message of a collective call that was received.
  std::optional<wire::RmaExchange> take() VERBATIM_EXCLUDES(mutex_);

  End end() const { return end_.load(std::memory_order_acquire); }
  // Of a connection that has ended: what the rank sent as reason, or the error.
  std::string reason() const VERBATIM_EXCLUDES(mutex_);
  // When the end was read.
  std::uint64_t ended_ns() const { return ended_ns_.load(std::memory_order_relaxed); }

 private:
  struct Connection {
    UniqueFd socket;
    bool numbered = false;  // each message has its number in front
    bool works = true;
    int send_error = 0;  // an errno
    std::vector<std::uint8_t> unsent = {};
    std::vector<std::uint8_t> incoming = {};  // number and header, later the body too
    std::size_t filled = 0;
    wire::RmaMessageNumber received = 0;  // messages; of one that is not numbered: the number of the next one
  };

  void send_locked(const std::vector<std::uint8_t>& message) VERBATIM_REQUIRES(mutex_);
  static std::size_t header_end(const Connection& connection);
  void flush_locked() VERBATIM_REQUIRES(mutex_);
  void flush_locked(Connection& connection) VERBATIM_REQUIRES(mutex_);
  bool all_sent() const VERBATIM_REQUIRES(mutex_);
  bool other_works(const Connection& connection) const VERBATIM_REQUIRES(mutex_);
  // The connection carries nothing more. Without another one the channel has ended.
  void fail(Connection& connection, const std::string& why) VERBATIM_REQUIRES(mutex_);
  // One message of a connection; false: none is complete yet, or an earlier one comes over another connection.
  bool read_message(Connection& connection) VERBATIM_REQUIRES(mutex_);
  bool read_all(Connection& connection) VERBATIM_REQUIRES(mutex_);
  void process(wire::RmaMessageType type, std::span<const std::uint8_t> body) VERBATIM_REQUIRES(mutex_);
  void set_end(End end, std::string reason) VERBATIM_REQUIRES(mutex_);

  const int first_fd_;
  std::atomic<bool> first_works_{true};
  mutable Mutex mutex_;
  std::vector<Connection> connections_ VERBATIM_GUARDED_BY(mutex_);
  bool last_sent_ VERBATIM_GUARDED_BY(mutex_) = false;
  wire::RmaMessageNumber sent_ VERBATIM_GUARDED_BY(mutex_) = 0;  // messages
  wire::RmaMessageNumber next_ VERBATIM_GUARDED_BY(mutex_) = 0;  // to be processed
  std::deque<wire::RmaExchange> received_ VERBATIM_GUARDED_BY(mutex_);
  std::deque<wire::RmaLane> lanes_ VERBATIM_GUARDED_BY(mutex_);
  std::string reason_ VERBATIM_GUARDED_BY(mutex_);
  std::atomic<std::uint64_t> ended_ns_{0};
  std::atomic<End> end_{End::kOpen};
};

}  // namespace verbatim::rma
