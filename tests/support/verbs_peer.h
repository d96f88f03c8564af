// The other end of a connection, in a separate process: the test program, started again with kPeerArgument. It owns one
// device, one region and some QPs, and executes the requests that the test sends over a socket. It ends with the test,
// or when it is killed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/unique_fd.h"
#include "support/gpu_memory.h"
#include "support/verbs_fixture.h"

namespace verbatim::test {

constexpr const char* kPeerArgument = "--verbs-peer";

int run_peer();  // main function of the peer process

class Peer {
 public:
  struct Options {
    unsigned device = 0;
    std::uint32_t qps = 1;
    std::size_t region_bytes = 1 << 16;
    unsigned cores = 0;       // number of cores that the process may use; 0: all
    Place memory{};           // of the region
    int access = kAllAccess;  // of the region and of the QPs
  };

  explicit Peer(const Options& options);
  Peer() : Peer(Options{}) {}
  ~Peer();  // quit(), unless the process has already ended
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

  // These post on QP `qp` of the peer, with a local buffer inside its region.
  int post_recv(std::size_t offset, std::size_t length, std::uint64_t wr_id, std::uint32_t qp = 0);
  int post(ibv_wr_opcode opcode, std::size_t offset, std::size_t length, const SendOptions& options,
           std::uint32_t qp = 0);
  ibv_wc poll_sent(std::uint32_t qp = 0);
  ibv_wc poll_received(std::uint32_t qp = 0);

  // Starts to deregister the peer's region. The peer then checks whether these bytes hold the pattern, and poisons the
  // region. `await_deregistered` returns the result of this check.
  void start_deregistering(std::size_t offset, std::size_t length, std::uint64_t seed);
  bool replies_within(Milliseconds timeout);
  bool await_deregistered();
  // Deregisters the peer's region and frees its memory at once.
  void release();

  // Executes `count` fetch-and-adds of 1, one after the other. `await_added` returns after the last one.
  void start_adding(std::uint64_t count, const SendOptions& target, std::uint32_t qp = 0);
  void await_added();

  // Calls a function of the stand-in for CUDA in the peer process, and returns its result.
  enum class Standin : std::uint32_t {
    kBeginKernel,
    kEndKernel,
    kWaits,
    kCopies,
    kFailCopy,
    kKillContext,
    kSetDelay,
    kUsable
  };
  std::uint64_t standin(Standin function, std::uint64_t argument = 0);

  // The peer sends WRITEs, READs and SENDs of up to a whole region and receives, without pause, until it is killed or
  // an operation fails. It replies to no further request.
  void stream(const SendOptions& remote, std::uint32_t qp = 0);
  // Two peers exchange `count` zero-length WRITEs with immediate on QP 0 in each direction; both poll without sleep or
  // yield. One peer echoes; `ping` makes the other one start and returns in how many exchanges its process used more
  // processor time than `limit`.
  void start_echo(std::uint32_t count);
  void await_echo();
  std::uint64_t ping(std::uint32_t count, std::chrono::nanoseconds limit);

  void stop();                  // SIGSTOP; returns when the process has stopped
  void resume();                // SIGCONT
  void kill();                  // SIGKILL; returns when the process has ended
  void quit();                  // destroys its objects and exits; returns when the process has ended
  void exit_without_cleanup();  // exits without destroying its objects; returns when the process has ended
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
