// One end of the TCP connection between two processes, over which they exchange messages while their data moves by
// RDMA. It is made again when it has ended with an error: a reset, a timeout, an unreachable host. That says nothing
// about the peer, because the management network may have failed alone. It is made over other addresses, too, when the
// peer does not answer over those that it uses.
//
//   open --error--> lost --TCP connect to an address of the peer, kResume, kAck--> open
//                        --kResume of the peer came to the listener--> open
//
// kResume shows the session key and has a number that was not used before, and all messages on a TCP connection have
// MACs, also the first answer: who does not know that key can send none, and can at most send a request of an end
// before it has come.
//
// Each end knows under which addresses the other one listens, one on each of its interfaces. Both ends may make the
// channel again, because only one may know that it must be; if they do so at the same time, the attempt of the
// connecting side is kept. A channel without an error stays in use until the new one is accepted: the peer may be slow,
// or end. One that is replaced ends with a reset, and an end gives up its attempts with a reset, never with an end of
// file: the listener may have accepted them, and an end of file means that the process has ended.
//
// Each message that must arrive does so once and in order, until the channel ends: it is kept until the peer has
// acknowledged it, and sent again on each new TCP connection. It has a number, by which the peer knows repeats. Pings
// and pongs, queries and replies may get lost with a TCP connection. A listener that knows that a connection has ended
// answers with the last message of that connection, without a number.
//
// It never blocks. One thread at a time uses it, between open() and stop(); after stop() it can still send.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/result.h"
#include "base/socket_interface.h"
#include "base/unique_fd.h"
#include "channel/message_stream.h"
#include "runtime/event_loop.h"
#include "wire/authentication.h"
#include "wire/handshake.h"
#include "wire/notice.h"

namespace verbatim {

class Channel {
 public:
  using Message = MessageStream::Message;

  // Of all channels of a process; must outlive them.
  struct Process {
    const EventHandler& handler;  // gets the events of their sockets, with key() as id
    const std::vector<SocketInterface>& interfaces;
    std::uint64_t max_pause_ns = kNever;  // between attempts
  };
  struct Ends {
    wire::ConnectionEnd own;
    std::span<const wire::Address> peer;  // where it listens: wire::kMaxAddresses at most; must outlive the channel
  };
  struct Path {
    sockaddr_storage own, peer;
  };
  // What has become of the channel in a call.
  enum class Change : std::uint8_t {
    kNone,
    kNew,     // it is a new one
    kMoved,   // likewise, and the old one had not ended
    kBroken,  // the peer has made a new one, which could not be used: call lose()
  };

  // `max_body`: of a message that is received, in bytes.
  explicit Channel(std::uint32_t max_body = wire::kMaxNoticeBody) : stream_(max_body) {}

  // The TCP connection that the handshake has made, and its session key.
  void set_socket(UniqueFd socket, const wire::Key& session) {
    socket_ = std::move(socket);
    session_ = session;
  }
  const wire::Key& session() const { return session_; }
  const UniqueFd& socket() const { return socket_; }
  // By which its events are known. It stays the same.
  int key() const { return socket_.get(); }

  // From now on its events are reported. An error: of epoll_ctl.
  Status open(const Process& process, const Ends& ends);
  // It is no longer read, nor made again.
  void stop();

  // Not while it is lost. Also while it moves: then the old one is used until the new one answers.
  bool is_open() const { return lost_ == nullptr || lost_->moves; }
  // False: there is no memory, or, of a message that may get lost: it is lost, or the peer has not read for a long
  // time.
  bool send(const wire::Notice& notice);
  // A message of any length that must arrive.
  bool send(std::vector<std::uint8_t> message);
  // For another message about lanes. kFailed and kClose do not need it.
  bool has_room();
  std::size_t unacknowledged() const { return kept_.size(); }
  bool send_ping();
  // Returns true when the socket has all bytes that may be sent now. An acknowledgement leaves with the next message to
  // the peer, or alone when `unacknowledged` of its messages wait for one.
  bool flush(std::uint32_t unacknowledged = 1);
  bool has_unsent() const { return stream_.has_unsent(); }
  // Whether the peer's host has acknowledged everything that was sent; the kernel does so while the process is stopped.
  bool is_acknowledged() const;
  // As MessageStream::receive. The caller has nothing to do with pings, pongs and acknowledgements.
  Result<std::optional<Message>> receive();

  // It has ended with an error. False: there is no memory to make it again.
  bool lose(std::uint64_t now);
  // Continues the attempt, if its socket may have become ready.
  Change ready(std::uint64_t now);
  // The peer has made the channel again. `number`: of its kResume.
  Change accept(UniqueFd socket, std::uint64_t number, std::uint64_t now);
  // Begins or gives up an attempt when it is time.
  Change advance(std::uint64_t now);
  // When to call advance().
  std::uint64_t due_ns() const;
  // Only a few attempts are left, counted from the first call.
  void limit_attempts();
  bool is_being_made() const { return lost_ != nullptr; }
  // Whether the last attempt at an address that is the peer's for sure was refused: nothing listens there, or a
  // firewall says so. And how many were, since it is lost.
  bool is_refused() const { return lost_ != nullptr && lost_->refused; }
  unsigned refusals() const { return lost_ != nullptr ? lost_->refusals : 0; }

  // A message was sent over it that matters for lanes: it moves if the peer does not answer soon, or at once if it lies
  // on a path that is down.
  void ask_for_answer(std::uint64_t now, bool is_down);
  // Begins to move if that answer is overdue. Returns when to look again.
  std::uint64_t expect_answer(std::uint64_t now);
  // The peer does not answer: the channel moves, if only to another TCP connection between the same addresses.
  void move(std::uint64_t now) {
    if (lost_ == nullptr) begin_loss(now, true);
  }
  // Whether the peer may answer over another TCP connection, or at another address.
  bool may_be_made() const;

  // nullopt: not known, as of a socket that was reset at once.
  std::optional<Path> path() const;

 private:
  // While it is made again.
  struct Lost {
    // Addresses of the peer, in the order in which they are tried.
    std::array<wire::Address, wire::kMaxAddresses + 1> targets;
    std::uint8_t target_count = 0;  // 0: this end cannot make it again
    bool moves = false;             // it has not ended
    bool resume_sent = false;       // on `attempt`
    bool refused = false;
    bool is_limited = false;
    unsigned failed_attempts = 0;
    unsigned refusals = 0;
    std::uint64_t attempt_ns = 0;  // when `attempt` is given up, or the next one begins
    UniqueFd attempt;              // a TCP connection that may become the channel
    UniqueFd offered;              // one that the peer has made, of an end that prefers its own for a while
    std::uint64_t offered_number = 0;
    std::uint64_t offered_ns = 0;  // when it is taken
  };

  void find_path();
  bool has_other_path() const;
  void find_targets(Lost& lost) const;
  const wire::Address& target() const { return lost_->targets[lost_->failed_attempts % lost_->target_count]; }
  sockaddr_storage source_of(const sockaddr_storage& target) const;
  bool is_peers_for_sure() const;
  std::uint64_t pause_ns() const;
  bool begin_loss(std::uint64_t now, bool moves);
  void end_loss();
  void begin_attempt(std::uint64_t now);
  void drop_attempt();
  Change give_up_attempt(std::uint64_t now);
  void set_refused(bool refused);
  void receive_pong();
  bool receive_ack(std::span<const std::uint8_t> body);
  // Whether the peer has sent something on the TCP connection that was made again. Before, another process may have
  // sent its request.
  bool is_peers() const { return since_ns_ == 0 || stream_.has_received(); }
  // `number`: of its kResume, which this end has sent if it has `dialed`.
  Change replace(UniqueFd socket, bool dialed, std::uint64_t number, std::uint64_t now);
  wire::Key key_of(bool dialed, std::uint64_t number) const;

  UniqueFd socket_;
  wire::Key session_{};
  std::uint64_t resumes_ = 0;  // that this end has sent
  MessageStream stream_;
  const Process* process_ = nullptr;
  Ends ends_;
  struct ShortPath {
    sockaddr_in6 own, peer;  // or sockaddr_in
  };
  std::unique_ptr<ShortPath> path_;
  bool dialed_ = false;               // this end has made it: the port of the peer's address is that of its listener
  std::uint32_t to_acknowledge_ = 0;  // messages of the peer
  std::unique_ptr<Lost> lost_;
  std::vector<std::vector<std::uint8_t>> kept_;       // messages which the peer has not acknowledged
  std::unique_ptr<std::vector<std::uint8_t>> spare_;  // memory for the next one
  std::size_t transmitted_ = 0;                       // of `kept_`, on this socket
  std::uint64_t acknowledged_ = 0;                    // by the peer: the number of the first one in `kept_`
  std::uint64_t received_ = 0;                        // of the peer's
  std::optional<std::uint64_t> peers_number_;         // of the peer's next one on this socket, when it has said so
  std::uint32_t pongs_owed_ = 0;                      // pings of the peer that are not answered
  std::uint32_t pings_sent_ = 0;                      // on this socket
  std::uint32_t pongs_received_ = 0;                  // likewise
  std::uint32_t awaited_pongs_ = 0;                   // by answer_due_ns_
  std::uint64_t answer_due_ns_ = 0;                   // 0: no answer is awaited
  std::uint64_t since_ns_ = 0;                        // when it was made again
};

}  // namespace verbatim
