#include "support/verbs_peer.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <utility>

#include "support/crash.h"
#include "support/cuda/standin_cuda.h"

extern char** environ;

namespace verbatim::test {
namespace {

constexpr int kPeerSocket = 3;

}  // namespace

enum class PeerCommand : std::uint32_t {
  kOpen,
  kAddress,
  kConnect,
  kPoison,
  kFill,
  kFindWrongByte,
  kUntouchedOutside,
  kPostRecv,
  kPost,
  kPollSent,
  kPollReceived,
  kDeregister,
  kRelease,
  kAdd,
  kStandin,
  kStream,
  kEcho,
  kPing,
  kExitWithoutCleanup,
};

struct Peer::Request {
  PeerCommand command{};
  std::uint32_t qp = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::uint64_t number = 0;  // seed, wr_id or count
  Options options{};
  ibv_wr_opcode opcode{};
  SendOptions send{};
  Address address{};
};

struct Peer::Reply {
  int result;
  std::uint32_t rkey;
  std::uint64_t number;  // address or index
  Address address;
  ibv_wc wc;
};

// The objects of the peer process; it serves one request at a time.
class PeerService {
 public:
  explicit PeerService(const Peer::Options& options)
      : device_(open_device(options.device)),
        region_(device_.pd.get(), options.memory, options.region_bytes, 0, options.access) {
    for (std::uint32_t i = 0; i < options.qps; ++i) {
      endpoints_.push_back(std::make_unique<Endpoint>(device_, EndpointOptions{.access = options.access}));
    }
  }

  Peer::Reply serve(const Peer::Request& request) {
    Peer::Reply reply{};
    Endpoint& endpoint = *endpoints_.at(request.qp);
    const auto sges = [&]() -> std::vector<ibv_sge> {
      if (request.length == 0) return {};
      return {region_.sge(request.offset, request.length)};
    };
    switch (request.command) {
      case PeerCommand::kOpen:
        reply.number = region_.address();
        reply.rkey = region_.mr->rkey;
        break;
      case PeerCommand::kAddress:
        reply.address = endpoint.address();
        break;
      case PeerCommand::kConnect:
        endpoint.connect(request.address);
        break;
      case PeerCommand::kPoison:
        region_.poison();
        break;
      case PeerCommand::kFill:
        region_.fill(request.offset, request.length, request.number);
        break;
      case PeerCommand::kFindWrongByte: {
        const auto wrong = region_.find_wrong_byte(request.offset, request.length, request.number);
        reply.result = wrong.has_value();
        reply.number = wrong.value_or(0);
        break;
      }
      case PeerCommand::kUntouchedOutside:
        reply.result = region_.untouched_outside(request.offset, request.length).empty();
        break;
      case PeerCommand::kPostRecv:
        reply.result = verbatim::test::post_recv(endpoint.qp(), sges(), request.number);
        break;
      case PeerCommand::kPost:
        reply.result = verbatim::test::post(endpoint.qp(), request.opcode, sges(), request.send);
        break;
      case PeerCommand::kPollSent:
        reply.wc = poll_one(endpoint.send_cq());
        break;
      case PeerCommand::kPollReceived:
        reply.wc = poll_one(endpoint.recv_cq());
        break;
      case PeerCommand::kDeregister:
        region_.mr.reset();
        reply.result = !region_.find_wrong_byte(request.offset, request.length, request.number);
        region_.poison();
        break;
      case PeerCommand::kRelease:
        region_.release();
        break;
      case PeerCommand::kAdd:
        for (std::uint64_t i = 0; i < request.number && reply.result == 0; ++i) {
          reply.result = post_atomic(endpoint.qp(), IBV_WR_ATOMIC_FETCH_AND_ADD, region_.sge(8, 8), request.send, 1);
          if (reply.result == 0) reply.result = poll_one(endpoint.send_cq()).status;
        }
        break;
      case PeerCommand::kStandin:
        reply.number = standin(static_cast<Peer::Standin>(request.length), request.number);
        break;
      case PeerCommand::kStream:
        stream(endpoint, request.send);
        break;
      case PeerCommand::kEcho:
        reply.result = exchange(endpoint, request.number, false);
        break;
      case PeerCommand::kPing: {
        std::uint64_t used = used_ns();
        for (std::uint64_t i = 0; i < request.number && reply.result == 0; ++i) {
          reply.result = exchange(endpoint, 1, true);
          const std::uint64_t before = std::exchange(used, used_ns());
          if (used - before > request.offset) ++reply.number;
        }
        break;
      }
      case PeerCommand::kExitWithoutCleanup:
        std::exit(EXIT_SUCCESS);
    }
    return reply;
  }

 private:
  void stream(Endpoint& endpoint, SendOptions remote) {
    constexpr unsigned kAhead = 16;
    constexpr ibv_wr_opcode kKinds[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_SEND,
                                        IBV_WR_RDMA_WRITE_WITH_IMM};
    unsigned outstanding = 0;
    for (std::size_t i = 0;; ++i) {
      for (; outstanding < kAhead; ++outstanding, ++i) {
        const ibv_wr_opcode kind = kKinds[i % std::size(kKinds)];
        const std::size_t length = kind == IBV_WR_SEND ? 64 : region_.size();
        if (verbatim::test::post(endpoint.qp(), kind, {region_.sge(0, length)}, remote) != 0) return;
      }
      if (!poll_once(endpoint.send_cq(), outstanding)) return;
      unsigned awaited = 1;
      if (!poll_once(endpoint.recv_cq(), awaited)) return;
      if (awaited == 0 && verbatim::test::post_recv(endpoint.qp(), {region_.sge(0, 64)}) != 0) return;
    }
  }

  // Polls once and subtracts a completion that was found from `outstanding`; false when the poll or the completion
  // failed.
  static bool poll_once(ibv_cq* cq, unsigned& outstanding) {
    ibv_wc wc{};
    const int polled = ibv_poll_cq(cq, 1, &wc);
    if (polled < 0 || (polled == 1 && wc.status != IBV_WC_SUCCESS)) return false;
    outstanding -= static_cast<unsigned>(polled);
    return true;
  }

  static std::uint64_t standin(Peer::Standin function, std::uint64_t argument) {
    switch (function) {
      case Peer::Standin::kBeginKernel:
        cuda().standin_cuda_begin_kernel(static_cast<int>(argument));
        break;
      case Peer::Standin::kEndKernel:
        cuda().standin_cuda_end_kernel(static_cast<int>(argument));
        break;
      case Peer::Standin::kWaits:
        return cuda().standin_cuda_waits() + cuda().standin_cuda_pageable_copies();
      case Peer::Standin::kCopies:
        return cuda().standin_cuda_copies();
      case Peer::Standin::kFailCopy:
        cuda().standin_cuda_fail_copy(static_cast<unsigned>(argument), CUDA_ERROR_LAUNCH_FAILED);
        break;
      case Peer::Standin::kKillContext:
        cuda().standin_cuda_kill_context(static_cast<int>(argument));
        break;
      case Peer::Standin::kSetDelay:
        set_copy_delay_us(static_cast<unsigned>(argument));
        break;
      case Peer::Standin::kUsable:
        for (unsigned gpu = 0; gpu < gpu_count(); ++gpu) {
          if (!is_gpu_usable(gpu)) return 0;
        }
        return 1;
    }
    return 0;
  }

  // The processor time of this process.
  static std::uint64_t used_ns() {
    timespec now{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
  }

  static bool spin_for_one(ibv_cq* cq) {
    ibv_wc wc{};
    int polled = 0;
    while ((polled = ibv_poll_cq(cq, 1, &wc)) == 0) {
    }
    return polled == 1 && wc.status == IBV_WC_SUCCESS;
  }

  int exchange(Endpoint& endpoint, std::uint64_t count, bool starts) {
    for (std::uint64_t i = 0; i < count; ++i) {
      if (!starts && !spin_for_one(endpoint.recv_cq())) return EIO;
      if (verbatim::test::post_recv(endpoint.qp(), {}) != 0) return EIO;
      if (verbatim::test::post(endpoint.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, {}) != 0) return EIO;
      if (starts && !spin_for_one(endpoint.recv_cq())) return EIO;
      if (!spin_for_one(endpoint.send_cq())) return EIO;
    }
    return 0;
  }

  Device device_;
  PlacedRegion region_;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
};

// Called before the library starts threads, because threads inherit the affinity.
void run_on_first_cores(unsigned cores) {
  if (cores == 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (unsigned core = 0; core < cores; ++core) CPU_SET(core, &set);
  sched_setaffinity(0, sizeof(set), &set);
}

int run_peer() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a peer that streams does not read its socket, so it would not see the test's end
  std::unique_ptr<PeerService> service;
  Peer::Request request{};
  while (recv(kPeerSocket, &request, sizeof(request), 0) == sizeof(request)) {
    Peer::Reply reply{};
    try {
      if (!service) {
        run_on_first_cores(request.options.cores);
        service = std::make_unique<PeerService>(request.options);
      }
      reply = service->serve(request);
    } catch (const std::exception& failure) {
      std::fprintf(stderr, "peer: %s\n", failure.what());
      return EXIT_FAILURE;
    }
    if (send(kPeerSocket, &reply, sizeof(reply), MSG_NOSIGNAL) != sizeof(reply)) break;
  }
  return EXIT_SUCCESS;
}

namespace {

// Where meson.build requests it, each peer is the first process of a PID namespace of its own. Only children of this
// thread are affected while the object lives.
class PidNamespaceOfChildren {
 public:
  PidNamespaceOfChildren() {
    if (std::getenv("SOFTVERBS_TEST_PID_NAMESPACES") == nullptr) return;
    own_.reset(open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC));
    if (!own_ || unshare(CLONE_NEWPID) != 0) throw std::runtime_error("unshare");
  }
  ~PidNamespaceOfChildren() {
    if (own_ && setns(own_.get(), CLONE_NEWPID) != 0) std::perror("setns");
  }
  PidNamespaceOfChildren(const PidNamespaceOfChildren&) = delete;
  PidNamespaceOfChildren& operator=(const PidNamespaceOfChildren&) = delete;

 private:
  UniqueFd own_;
};

}  // namespace

Peer::Peer(const Options& options) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("socketpair");
  socket_.reset(ends[0]);
  const UniqueFd peer_end(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, peer_end.get(), kPeerSocket);
  std::string argument(kPeerArgument);
  std::string name("verbs-peer");
  char* const argv[] = {name.data(), argument.data(), nullptr};
  const PidNamespaceOfChildren pid_namespace;
  const int result = posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (result != 0) throw std::runtime_error("posix_spawn");
  Request request{};
  request.command = PeerCommand::kOpen;
  request.options = options;
  const Reply reply = request_reply(request);
  region_ = reply.number;
  rkey_ = reply.rkey;
  for (std::uint32_t qp = 0; qp < options.qps; ++qp) {
    request.command = PeerCommand::kAddress;
    request.qp = qp;
    addresses_.push_back(request_reply(request).address);
  }
}

Peer::~Peer() {
  if (pid_ > 0) quit();
}

void Peer::send(const Request& request) {
  if (::send(socket_.get(), &request, sizeof(request), MSG_NOSIGNAL) != sizeof(request)) {
    throw std::runtime_error("the peer process has ended");
  }
}

Peer::Reply Peer::await_reply() {
  Reply reply{};
  if (!readable(socket_.get(), kCompletionTimeout + 10s) ||
      recv(socket_.get(), &reply, sizeof(reply), 0) != sizeof(reply)) {
    throw std::runtime_error("the peer process does not reply");
  }
  return reply;
}

Peer::Reply Peer::request_reply(const Request& request) {
  send(request);
  return await_reply();
}

void Peer::connect(const Address& remote, std::uint32_t qp) {
  request_reply({.command = PeerCommand::kConnect, .qp = qp, .address = remote});
}
void Peer::poison() {
  request_reply({.command = PeerCommand::kPoison});
}
void Peer::fill(std::size_t offset, std::size_t length, std::uint64_t seed) {
  request_reply({.command = PeerCommand::kFill, .offset = offset, .length = length, .number = seed});
}
std::optional<std::size_t> Peer::find_wrong_byte(std::size_t offset, std::size_t length, std::uint64_t seed) {
  const Reply reply =
      request_reply({.command = PeerCommand::kFindWrongByte, .offset = offset, .length = length, .number = seed});
  if (reply.result == 0) return std::nullopt;
  return reply.number;
}
bool Peer::untouched_outside(std::size_t offset, std::size_t length) {
  return request_reply({.command = PeerCommand::kUntouchedOutside, .offset = offset, .length = length}).result != 0;
}
int Peer::post_recv(std::size_t offset, std::size_t length, std::uint64_t wr_id, std::uint32_t qp) {
  return request_reply(
             {.command = PeerCommand::kPostRecv, .qp = qp, .offset = offset, .length = length, .number = wr_id})
      .result;
}
int Peer::post(ibv_wr_opcode opcode, std::size_t offset, std::size_t length, const SendOptions& options,
               std::uint32_t qp) {
  return request_reply({.command = PeerCommand::kPost,
                        .qp = qp,
                        .offset = offset,
                        .length = length,
                        .opcode = opcode,
                        .send = options})
      .result;
}
ibv_wc Peer::poll_sent(std::uint32_t qp) {
  return request_reply({.command = PeerCommand::kPollSent, .qp = qp}).wc;
}
ibv_wc Peer::poll_received(std::uint32_t qp) {
  return request_reply({.command = PeerCommand::kPollReceived, .qp = qp}).wc;
}
void Peer::start_deregistering(std::size_t offset, std::size_t length, std::uint64_t seed) {
  send({.command = PeerCommand::kDeregister, .offset = offset, .length = length, .number = seed});
}
bool Peer::replies_within(Milliseconds timeout) {
  return readable(socket_.get(), timeout);
}
bool Peer::await_deregistered() {
  return await_reply().result != 0;
}
void Peer::release() {
  request_reply({.command = PeerCommand::kRelease});
}
void Peer::start_adding(std::uint64_t count, const SendOptions& target, std::uint32_t qp) {
  send({.command = PeerCommand::kAdd, .qp = qp, .number = count, .send = target});
}
void Peer::await_added() {
  EXPECT_EQ(await_reply().result, 0);
}
std::uint64_t Peer::standin(Standin function, std::uint64_t argument) {
  return request_reply(
             {.command = PeerCommand::kStandin, .length = static_cast<std::uint64_t>(function), .number = argument})
      .number;
}
void Peer::stream(const SendOptions& remote, std::uint32_t qp) {
  send({.command = PeerCommand::kStream, .qp = qp, .send = remote});
}
void Peer::start_echo(std::uint32_t count) {
  send({.command = PeerCommand::kEcho, .number = count});
}
void Peer::await_echo() {
  EXPECT_EQ(await_reply().result, 0);
}

void Peer::reap() {
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  report_crash(status);
  if (WIFEXITED(status)) {
    EXPECT_EQ(WEXITSTATUS(status), EXIT_SUCCESS) << "of the peer process";
  } else {
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "the peer process died of another cause";
  }
}

void Peer::kill() {
  ::kill(pid_, SIGKILL);
  reap();
}

std::uint64_t Peer::ping(std::uint32_t count, std::chrono::nanoseconds limit) {
  const Reply reply = request_reply(
      {.command = PeerCommand::kPing, .offset = static_cast<std::uint64_t>(limit.count()), .number = count});
  EXPECT_EQ(reply.result, 0);
  return reply.number;
}

void Peer::stop() {
  ::kill(pid_, SIGSTOP);
  int status = 0;
  while (waitpid(pid_, &status, WUNTRACED) < 0 && errno == EINTR) {
  }
}

void Peer::resume() {
  ::kill(pid_, SIGCONT);
}

void Peer::exit_without_cleanup() {
  send({.command = PeerCommand::kExitWithoutCleanup});
  reap();
}

void Peer::quit() {
  socket_.reset();
  reap();
}

}  // namespace verbatim::test
