// The TCP connection to one other rank: collective calls send and receive messages on it, and its end says that the
// other rank has closed, failed or died. Any thread: the calls of NCCL, and the monitor when the connection ends.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
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

  explicit Channel(UniqueFd socket) : socket_(std::move(socket)) {}
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int fd() const { return socket_.get(); }

  // Puts a message behind those that are not sent yet, and sends what the socket accepts.
  void send(const std::vector<std::uint8_t>& message) VERBATIM_EXCLUDES(mutex_);
  // Sends what the socket accepts. True: all is sent. A send that fails ends the connection.
  bool flush() VERBATIM_EXCLUDES(mutex_);
  // The same as send; then waits until the socket has accepted all, or `stops` is set.
  void send_all(const std::vector<std::uint8_t>& message, const std::atomic<bool>& stops) VERBATIM_EXCLUDES(mutex_);
  // Sends a last message if the socket accepts it at once; the other rank reads the end of the connection behind it.
  void send_last(const std::vector<std::uint8_t>& message) VERBATIM_EXCLUDES(mutex_);

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
  void flush_locked() VERBATIM_REQUIRES(mutex_);
  void fail_send(int why) VERBATIM_REQUIRES(mutex_);
  // One message; false: not complete yet.
  bool read_message() VERBATIM_REQUIRES(mutex_);
  void process(wire::RmaMessageType type, std::span<const std::uint8_t> body) VERBATIM_REQUIRES(mutex_);
  void set_end(End end, std::string reason) VERBATIM_REQUIRES(mutex_);

  const UniqueFd socket_;
  mutable Mutex mutex_;
  std::vector<std::uint8_t> unsent_ VERBATIM_GUARDED_BY(mutex_);
  bool send_failed_ VERBATIM_GUARDED_BY(mutex_) = false;
  std::vector<std::uint8_t> incoming_ VERBATIM_GUARDED_BY(mutex_);  // header, later header and body
  std::size_t filled_ VERBATIM_GUARDED_BY(mutex_) = 0;
  std::deque<wire::RmaExchange> received_ VERBATIM_GUARDED_BY(mutex_);
  std::deque<wire::RmaLane> lanes_ VERBATIM_GUARDED_BY(mutex_);
  std::string reason_ VERBATIM_GUARDED_BY(mutex_);
  std::atomic<std::uint64_t> ended_ns_{0};
  std::atomic<End> end_{End::kOpen};
};

}  // namespace verbatim::rma
