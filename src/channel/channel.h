// One end of the TCP connection between two processes, over which they exchange messages while their data moves by
// RDMA. It is made again when it has ended with an error: a reset, a timeout, an unreachable host. That says nothing
// about the peer, because the management network may have failed alone. It is made over other addresses, too, when the
// peer does not answer over those that it uses.
//
//   open --error--> lost --TCP connect to an address of the peer, kResume, kPing--> open
//                        --kResume of the peer came to the listener--> open
//
// Each end knows under which addresses the other one listens, one on each of its interfaces. Both ends may make the
// channel again, because only one may know that it must be; if they do so at the same time, the attempt of the
// connecting side is kept. A channel without an error stays in use until the new one is accepted: the peer may be slow,
// or end. One that is replaced ends with a reset, and an end gives up its attempts with a reset, never with an end of
// file: the listener may have accepted them, and an end of file means that the process has ended.
//
// It never blocks, and allocates only in open() and when it is lost. One thread at a time uses it.
#pragma once

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
#include "wire/handshake.h"
#include "wire/notice.h"

namespace verbatim {

class Channel {
 public:
  using Message = MessageStream::Message;

  // Of all channels of a process; must outlive them.
  struct Host {
    const EventHandler& handler;  // gets the events of their sockets, with key() as id
    const std::vector<SocketInterface>& interfaces;
  };
  struct Ends {
    wire::ConnectionEnd own;
    std::span<const wire::Address> peer;  // where it listens; must outlive the channel
  };
  struct Path {
    sockaddr_storage own, peer;
  };
  // What has become of the channel in a call.
  enum class Change : std::uint8_t {
    kNone,
    kNew,     // it is a new one: what was sent over the old one may not have arrived
    kMoved,   // likewise, and the old one had not ended
    kBroken,  // the peer has made a new one, which could not be used: call lose()
  };

  // The TCP connection that the handshake has made.
  void set_socket(UniqueFd socket) { socket_ = std::move(socket); }
  const UniqueFd& socket() const { return socket_; }
  // By which its events are known. It stays the same.
  int key() const { return socket_.get(); }

  // From now on its events are reported. The functions below are used between open() and stop(), the first ones and
  // flush() also after it.
  Status open(const Host& host, const Ends& ends);
  // It is no longer read, nor made again.
  void stop();

  // Not while it is lost. Also while it moves: then the old one is used until the new one answers.
  bool is_open() const { return lost_ == nullptr || lost_->moves; }
  // False: it is lost, or the peer has not read for a long time.
  bool send(const wire::Notice& notice) { return is_open() && stream_.send(socket_, notice); }
  bool send_ping();
  // Returns true when the socket has all bytes.
  bool flush() { return stream_.flush(socket_); }
  bool has_unsent() const { return stream_.has_unsent(); }
  // Whether the peer's host has acknowledged everything that was sent; the kernel does so while the process is stopped.
  bool is_acknowledged() const;
  // As MessageStream::receive. Pings are answered, and counted: the caller has nothing to do with them or with pongs.
  Result<std::optional<Message>> receive();

  // It has ended with an error. False: there is no memory to make it again.
  bool lose(std::uint64_t now);
  // Continues the attempt, if its socket may have become ready.
  Change ready(std::uint64_t now);
  // The peer has made the channel again.
  Change accept(UniqueFd socket, std::uint64_t now);
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
  bool awaits_answer() const { return answer_due_ns_ != 0; }
  // Begins to move if that answer is overdue. Returns when to look again.
  std::uint64_t expect_answer(std::uint64_t now);

  // nullptr: not known, as of a socket that was reset at once.
  const Path* path() const { return path_.get(); }

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
  bool replace(UniqueFd socket, bool dialed, std::uint64_t now);
  Change use(UniqueFd socket, std::uint64_t now);

  UniqueFd socket_;
  MessageStream stream_;
  const Host* host_ = nullptr;
  Ends ends_;
  std::unique_ptr<Path> path_;
  bool dialed_ = false;  // this end has made it: the port of the peer's address is that of its listener
  std::unique_ptr<Lost> lost_;
  std::uint32_t pings_sent_ = 0;      // on this socket
  std::uint32_t pongs_received_ = 0;  // likewise
  std::uint32_t awaited_pongs_ = 0;   // by answer_due_ns_
  std::uint64_t answer_due_ns_ = 0;   // 0: no answer is awaited
  std::uint64_t since_ns_ = 0;        // when it was made again
};

}  // namespace verbatim
