// The other side of a connection, in a process of its own: the test program, run again with kPeerArgument. It owns one
// device, one region and some QPs, and does what the test asks over a socket. It ends with the test, or when killed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/unique_fd.h"
#include "support/verbs_fixture.h"

namespace verbatim::test {

constexpr const char* kPeerArgument = "--verbs-peer";

int run_peer();  // the peer's main

class Peer {
 public:
  struct Options {
    unsigned device = 0;
    std::uint32_t qps = 1;
    std::size_t region_bytes = 1 << 16;
    unsigned cores = 0;  // runs on the first so many only; 0: on all
  };

  explicit Peer(const Options& options);
  Peer() : Peer(Options{}) {}
  ~Peer();  // ends it in good order unless it is gone already
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  const Address& address(std::uint32_t qp = 0) const { return addresses_.at(qp); }
  std::uint64_t region(std::size_t offset = 0) const { return region_ + offset; }
  std::uint32_t rkey() const { return rkey_; }
  SendOptions target(std::uint64_t wr_id, std::size_t offset = 0) const {
    return {.wr_id = wr_id, .remote_addr = region(offset), .rkey = rkey_};
  }

  void connect(const Address& remote, std::uint32_t qp = 0);
  void poison();
  void fill(std::size_t offset, std::size_t length, std::uint64_t seed);
  std::optional<std::size_t> find_wrong_byte(std::size_t offset, std::size_t length, std::uint64_t seed);
  bool untouched_outside(std::size_t offset, std::size_t length);

  // On its QP `qp`, with a local buffer inside its region.
  int post_recv(std::size_t offset, std::size_t length, std::uint64_t wr_id, std::uint32_t qp = 0);
  int post(ibv_wr_opcode opcode, std::size_t offset, std::size_t length, const SendOptions& options,
           std::uint32_t qp = 0);
  ibv_wc poll_sent(std::uint32_t qp = 0);
  ibv_wc poll_received(std::uint32_t qp = 0);

  // Deregisters its region, looks whether these bytes hold the pattern, and poisons the region; `await_deregistered`
  // gives what it saw.
  void start_deregistering(std::size_t offset, std::size_t length, std::uint64_t seed);
  bool replies_within(Milliseconds timeout);
  bool await_deregistered();

  // Every kind of traffic without pause, with up to a region to write, read and receive, until it is killed or an
  // operation fails. Answers nothing more.
  void stream(const SendOptions& remote, std::uint32_t qp = 0);
  // `count` zero-length immediates there and back on QP 0, both ends polling without sleep or yield. One peer starts
  // and is asked for the processor time of its process for one exchange, another one echoes.
  void start_echo(std::uint32_t count);
  void await_echo();
  std::chrono::nanoseconds ping(std::uint32_t count);

  void stop();                  // SIGSTOP; returns when it has stopped
  void resume();                // SIGCONT
  void kill();                  // SIGKILL; returns when it is gone
  void quit();                  // destroys its objects and exits; returns when it is gone
  void exit_without_cleanup();  // exits without destroying anything; returns when it is gone
  int pid() const { return pid_; }

 private:
  struct Request;
  struct Reply;
  friend class PeerService;
  friend int run_peer();

  Reply request_reply(const Request& request);
  void send(const Request& request);
  Reply await_reply();
  void reap();

  UniqueFd socket_;
  int pid_ = -1;
  std::vector<Address> addresses_;
  std::uint64_t region_ = 0;
  std::uint32_t rkey_ = 0;
};

}  // namespace verbatim::test
