// The channel to one other rank, with what was received over it. The loop's thread reads, and makes the TCP connection
// again when it has ended with an error; any thread sends and takes messages. The end of the channel says that the
// other rank has closed, failed or died.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "base/socket_interface.h"
#include "base/unique_fd.h"
#include "channel/channel.h"
#include "net/monitor/monitor.h"
#include "runtime/event_loop.h"
#include "wire/notice.h"
#include "wire/rma.h"

namespace verbatim {
class Listener;
}  // namespace verbatim

namespace verbatim::rma {

class PeerChannel {
 public:
  // kClosed: the rank has closed, nothing more comes. kFailed: it has sent why its communicator failed. kEnded: its
  // process has ended without either. kLost: this end has given up the channel.
  enum class End : std::uint8_t { kOpen, kClosed, kFailed, kEnded, kLost };

  // Of all channels of a process; must outlive them.
  struct Process {
    Monitor& monitor;
    Listener& listener;
    const std::vector<SocketInterface>& interfaces;
    unsigned keepalive_s = 0;       // of the TCP connections; 0: none
    std::uint64_t max_loss_ns = 0;  // how long it may take to make one again
  };

  // `socket`, `session`: those of the handshake. `end`: the own one. `addresses`: where the other rank listens.
  PeerChannel(const Process& process, UniqueFd socket, const wire::ConnectionEnd& end, const wire::Key& session,
              std::vector<wire::Address> addresses);
  ~PeerChannel() { close(); }
  PeerChannel(const PeerChannel&) = delete;
  PeerChannel& operator=(const PeerChannel&) = delete;

  // From now on it is served. `changed` is called by the loop's thread, without a lock, when something has come, or the
  // end. If epoll_ctl fails, that is the end.
  void open(std::function<void()> changed) VERBATIM_EXCLUDES(mutex_);
  // `changed` is called no more.
  void close() noexcept VERBATIM_EXCLUDES(mutex_);

  // Sends the message, behind the earlier ones. Nothing is sent after the end, or after the last message.
  void send(std::vector<std::uint8_t> message) VERBATIM_EXCLUDES(mutex_);
  // kClose or kFailed. Only the first one is sent.
  void send_last(const wire::Notice& notice) VERBATIM_EXCLUDES(mutex_);

  // Nothing more is taken from the other rank: it has sent what a rank does not send.
  void give_up(const char* reason) VERBATIM_EXCLUDES(mutex_);

  // The next message about a lane that was received.
  std::optional<wire::RmaLane> take_lane() VERBATIM_EXCLUDES(mutex_);
  // The next message of a collective call that was received.
  std::optional<wire::RmaExchange> take() VERBATIM_EXCLUDES(mutex_);

  End end() const { return end_.load(std::memory_order_acquire); }
  // Of a channel that has ended: what the rank sent as reason, or the error.
  std::string reason() const VERBATIM_EXCLUDES(mutex_);
  // When the end was read.
  std::uint64_t ended_ns() const { return ended_ns_.load(std::memory_order_relaxed); }
  // It has ended, and the other rank has received all that was sent, or receives no more.
  bool is_over() const VERBATIM_EXCLUDES(mutex_);

 private:
  enum class State : std::uint8_t { kMade, kServed, kStopped };

  // The loop's thread.
  void ready() noexcept VERBATIM_EXCLUDES(mutex_);
  // Returns when it is to be called again.
  std::uint64_t attend() noexcept VERBATIM_EXCLUDES(mutex_);
  void advance(std::uint64_t now) VERBATIM_REQUIRES(mutex_);
  void read(std::uint64_t now) VERBATIM_REQUIRES(mutex_);
  void process(const Channel::Message& message) VERBATIM_REQUIRES(mutex_);
  // The TCP connection has ended.
  void lose(const Error& error, std::uint64_t now) VERBATIM_REQUIRES(mutex_);
  void changed(Channel::Change change, std::uint64_t now) VERBATIM_REQUIRES(mutex_);
  void ask_for_answer(std::uint64_t now) VERBATIM_REQUIRES(mutex_);
  void try_last() VERBATIM_REQUIRES(mutex_);
  std::uint64_t due_ns(std::uint64_t now) VERBATIM_REQUIRES(mutex_);
  std::uint64_t loss_deadline_ns() const VERBATIM_REQUIRES(mutex_);
  void set_end(End end, std::string reason) VERBATIM_REQUIRES(mutex_);
  void stop(std::optional<wire::MessageType> last) noexcept VERBATIM_REQUIRES(mutex_);
  // For a peer that makes the channel again after the end of this one.
  wire::MessageType last() const VERBATIM_REQUIRES(mutex_);

  const wire::ConnectionEnd own_;
  const std::vector<wire::Address> addresses_;
  const Process& process_;
  std::function<void()> changed_;
  mutable Mutex mutex_;
  Channel channel_ VERBATIM_GUARDED_BY(mutex_){wire::kMaxRmaBodyBytes};
  std::optional<Channel::Process> channel_process_ VERBATIM_GUARDED_BY(mutex_);
  State state_ VERBATIM_GUARDED_BY(mutex_) = State::kMade;
  bool has_received_ VERBATIM_GUARDED_BY(mutex_) = false;
  bool has_changed_ VERBATIM_GUARDED_BY(mutex_) = false;          // `changed_` is to be called
  std::optional<wire::Notice> last_ VERBATIM_GUARDED_BY(mutex_);  // that is to be sent
  bool last_sent_ VERBATIM_GUARDED_BY(mutex_) = false;
  std::uint64_t lost_ns_ VERBATIM_GUARDED_BY(mutex_) = 0;  // 0: it is not
  std::string loss_ VERBATIM_GUARDED_BY(mutex_);           // why
  std::string line_ VERBATIM_GUARDED_BY(mutex_);           // to be logged without the mutex
  std::deque<wire::RmaExchange> received_ VERBATIM_GUARDED_BY(mutex_);
  std::deque<wire::RmaLane> lanes_ VERBATIM_GUARDED_BY(mutex_);
  std::string reason_ VERBATIM_GUARDED_BY(mutex_);
  std::atomic<std::uint64_t> ended_ns_{0};
  std::atomic<End> end_{End::kOpen};
  std::unique_ptr<EventHandler> handler_;  // ends first: its calls need the others
};

}  // namespace verbatim::rma
