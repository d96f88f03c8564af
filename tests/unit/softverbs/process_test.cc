// Transfers between processes: the same bytes and errors as within one process, and the effects of a process that dies.
#include <gtest/gtest.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string_view>
#include <thread>
#include <utility>

#include "support/verbs_peer.h"

namespace verbatim::test {
namespace {

// meson.build sets the variable for the tests in which a filter or a setting forbids cross-memory access.
bool is_cross_memory_forbidden() {
  return std::getenv("SOFTVERBS_TEST_FORBIDDEN") != nullptr;
}

bool is_inline() {
  const char* const engine = std::getenv("SOFTVERBS_ENGINE");
  return engine != nullptr && std::string_view(engine) == "inline";
}

using Clock = std::chrono::steady_clock;

constexpr std::size_t kProcessSizes[] = {0, 1, 63, 64, 65, 4095, 4096, 4097, (1U << 20) + 3};
constexpr std::size_t kMargin = 512;
constexpr std::size_t kRegionBytes = (1U << 20) + 3 + 2 * kMargin;

// 16.8 ms per attempt, four attempts: a dead peer is given up after 67 ms to 0.27 s plus scheduling delays. Not for a
// living peer: on a busy machine it may need longer to start the thread that copies.
constexpr Timers kProcessTimers{.timeout = 12, .retry_count = 3};

// The parameter is the device of the peer: 0 the same device, 1 the other one.
class TwoProcesses : public testing::TestWithParam<unsigned> {
 protected:
  explicit TwoProcesses(const Timers& timers = {}) : endpoint(device, {.timers = timers}) {}

  void SetUp() override {
    endpoint.connect(peer.address());
    peer.connect(endpoint.address());
  }
  std::vector<ibv_sge> part(std::size_t offset, std::size_t length) const {
    if (length == 0) return {};
    return {region.sge(offset, length)};
  }

  Device device = open_device();
  Region region{device.pd.get(), kRegionBytes, 7};
  Endpoint endpoint;
  Peer peer{{.device = GetParam(), .region_bytes = kRegionBytes}};
};

// The peer ends before a message.
class TwoProcessesOneEnded : public TwoProcesses {
 protected:
  TwoProcessesOneEnded() : TwoProcesses(kProcessTimers) {}
};

std::string device_name(const testing::TestParamInfo<unsigned>& device) {
  return device.param == 0 ? "SameDevice" : "OtherDevice";
}
INSTANTIATE_TEST_SUITE_P(PeerOn, TwoProcesses, testing::Values(0U, 1U), device_name);
INSTANTIATE_TEST_SUITE_P(PeerOn, TwoProcessesOneEnded, testing::Values(0U, 1U), device_name);

TEST_P(TwoProcesses, Send_OfAnySize_ArrivesWhole) {
  for (const std::size_t size : kProcessSizes) {
    SCOPED_TRACE(size);
    region.fill(size);
    peer.poison();
    ASSERT_EQ(peer.post_recv(kMargin, size, 1), 0);
    ASSERT_EQ(post(endpoint.qp(), IBV_WR_SEND_WITH_IMM, part(0, size), {.imm = 0xABCD}), 0);
    EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
    const ibv_wc wc = peer.poll_received();
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.opcode, IBV_WC_RECV);
    EXPECT_EQ(wc.byte_len, size);
    EXPECT_EQ(wc.imm_data, 0xABCDU);
    EXPECT_EQ(wc.qp_num, peer.address().qp_num);
    EXPECT_EQ(peer.find_wrong_byte(kMargin, size, size), std::nullopt);
    EXPECT_TRUE(peer.untouched_outside(kMargin, size));
  }
}

TEST_P(TwoProcesses, SendFromPeer_ArrivesWhole) {
  for (const std::size_t size : kProcessSizes) {
    SCOPED_TRACE(size);
    region.buffer.poison();
    peer.fill(kMargin, size, size);
    ASSERT_EQ(post_recv(endpoint.qp(), part(3, size), 2), 0);
    ASSERT_EQ(peer.post(IBV_WR_SEND, kMargin, size, {.wr_id = 9}), 0);
    const ibv_wc wc = poll_one(endpoint.recv_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.byte_len, size);
    EXPECT_EQ(find_wrong_byte(region.bytes(3, size), size), std::nullopt);
    EXPECT_EQ(region.buffer.untouched_outside(3, size), "");
    EXPECT_EQ(peer.poll_sent().wr_id, 9U);
  }
}

TEST_P(TwoProcesses, Write_ChangesExactlyThePeersTarget) {
  for (const std::size_t size : kProcessSizes) {
    SCOPED_TRACE(size);
    region.fill(size + 1);
    peer.poison();
    ASSERT_EQ(peer.post_recv(0, 0, 40), 0);
    ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, part(0, size), peer.target(1, kMargin)), 0);
    SendOptions with_imm = peer.target(2, kMargin);
    with_imm.imm = 17;
    ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, part(0, size / 2), with_imm), 0);
    EXPECT_EQ(poll_one(endpoint.send_cq()).wr_id, 1U);
    EXPECT_EQ(poll_one(endpoint.send_cq()).wr_id, 2U);
    const ibv_wc wc = peer.poll_received();
    EXPECT_EQ(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
    EXPECT_EQ(wc.byte_len, size / 2);
    EXPECT_EQ(wc.imm_data, 17U);
    EXPECT_EQ(peer.find_wrong_byte(kMargin, size, size + 1), std::nullopt);
    EXPECT_TRUE(peer.untouched_outside(kMargin, size));
  }
}

TEST_P(TwoProcesses, Read_FetchesThePeersMemory) {
  for (const std::size_t size : kProcessSizes) {
    SCOPED_TRACE(size);
    region.buffer.poison();
    peer.fill(kMargin, size, size + 2);
    ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_READ, part(5, size), peer.target(1, kMargin)), 0);
    EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(find_wrong_byte(region.bytes(5, size), size + 2), std::nullopt);
    EXPECT_EQ(region.buffer.untouched_outside(5, size), "");
  }
}

TEST_P(TwoProcesses, InlineDataAndSgeLists_ArriveWhole) {
  std::byte small[40];
  fill_pattern(small, 1);
  const ibv_sge sge{reinterpret_cast<std::uint64_t>(small), sizeof(small), 0};
  SendOptions options = peer.target(1, 1);
  options.flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {sge}, options), 0);
  std::fill(std::begin(small), std::end(small), std::byte{0});
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(peer.find_wrong_byte(1, sizeof(small), 1), std::nullopt);
  EXPECT_TRUE(peer.untouched_outside(1, sizeof(small)));

  region.fill(2);
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {region.sge(0, 1), region.sge(1, 70000), region.sge(70001, 4096)},
                 peer.target(2, 100)),
            0);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(peer.find_wrong_byte(100, 74097, 2), std::nullopt);
}

TEST_P(TwoProcesses, SendBeforeReceive_CompletesAfterThePost) {
  region.fill(3);
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_SEND, {region.sge(0, 64)}), 0);
  EXPECT_TRUE(stays_empty(endpoint.send_cq(), 20ms));
  ASSERT_EQ(peer.post_recv(0, 64, 8), 0);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(peer.poll_received().wr_id, 8U);
  EXPECT_EQ(peer.find_wrong_byte(0, 64, 3), std::nullopt);
}

TEST_P(TwoProcesses, WriteBeyondRegion_IsAccessError) {
  ASSERT_EQ(peer.post_recv(0, 64, 1), 0);
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {region.sge(0, 65)}, peer.target(1, kRegionBytes - 64)), 0);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(peer.poll_received().status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(peer.untouched_outside(0, 0));
}

TEST_P(TwoProcesses, ReceiveTooSmall_FailsBothEnds) {
  ASSERT_EQ(peer.post_recv(0, 63, 1), 0);
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_SEND, {region.sge(0, 64)}), 0);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_REM_INV_REQ_ERR);
  EXPECT_EQ(peer.poll_received().status, IBV_WC_LOC_LEN_ERR);
}

// The device of a stopped program still executes requests.
TEST_P(TwoProcesses, StoppedPeer_StillReceives) {
  if (is_cross_memory_forbidden()) GTEST_SKIP() << "without cross-memory access a thread of the program has to copy";
  region.fill(4);
  ASSERT_EQ(peer.post_recv(8192, 64, 8), 0);
  peer.stop();
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {region.sge(0, 4096)}, peer.target(1)), 0);
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_SEND, {region.sge(0, 64)}), 0);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
  peer.resume();
  EXPECT_EQ(peer.poll_received().wr_id, 8U);
  EXPECT_EQ(peer.find_wrong_byte(0, 4096, 4), std::nullopt);
}

TEST_P(TwoProcessesOneEnded, KilledPeer_EndsInRetryExceeded) {
  ASSERT_EQ(post_recv(endpoint.qp(), part(0, 64), 50), 0);
  peer.kill();
  const auto start = Clock::now();
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {region.sge(0, 64)}, peer.target(1)), 0);
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {region.sge(0, 64)}, peer.target(2)), 0);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_RETRY_EXC_ERR);
  EXPECT_GE(Clock::now() - start, 60ms);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_WR_FLUSH_ERR);
  const ibv_wc flushed = poll_one(endpoint.recv_cq());
  EXPECT_EQ(flushed.wr_id, 50U);
  EXPECT_EQ(flushed.status, IBV_WC_WR_FLUSH_ERR);
}

TEST_P(TwoProcesses, EmptyMessageToKilledPeer_EndsInRetryExceeded) {
  ASSERT_EQ(peer.post_recv(0, 64, 1), 0);
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {region.sge(0, 64)}, peer.target(1)), 0);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
  peer.kill();
  std::this_thread::sleep_for(10ms);  // a device may need some time to detect the death
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_SEND, {}), 0);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_RETRY_EXC_ERR);
}

TEST_P(TwoProcessesOneEnded, PeerThatQuit_EndsInRetryExceeded) {
  peer.quit();
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_SEND, {region.sge(0, 64)}), 0);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_RETRY_EXC_ERR);
}

TEST_P(TwoProcessesOneEnded, PeerThatExitedWithoutCleanup_EndsInRetryExceeded) {
  peer.exit_without_cleanup();
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_READ, {region.sge(0, 64)}, peer.target(1)), 0);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_RETRY_EXC_ERR);
}

TEST_P(TwoProcesses, PeerKilledDuringTraffic_DoesNotBlockTheDevice) {
  for (std::uint64_t i = 0; i < 64; ++i) ASSERT_EQ(post_recv(endpoint.qp(), {region.sge()}, i), 0);
  peer.stream({.remote_addr = region.address(), .rkey = region.mr->rkey});
  ibv_wc last{};
  std::uint64_t posted = 0;
  std::uint64_t completed = 0;
  const auto push = [&](Clock::time_point until) {  // keeps 16 large WRITEs outstanding; stops at the first error
    while (Clock::now() < until && last.status == IBV_WC_SUCCESS) {
      for (; posted - completed < 16; ++posted) {
        if (post(endpoint.qp(), IBV_WR_RDMA_WRITE, {region.sge(0, 1 << 20)}, peer.target(posted)) != 0) return;
      }
      if (ibv_poll_cq(endpoint.send_cq(), 1, &last) == 1) {
        ++completed;
      } else {
        sched_yield();
      }
    }
  };
  push(Clock::now() + 50ms);
  ASSERT_EQ(last.status, IBV_WC_SUCCESS);
  peer.kill();
  push(Clock::now() + kCompletionTimeout);
  EXPECT_EQ(last.status, IBV_WC_RETRY_EXC_ERR) << verbs().wc_status_str(last.status);
  for (; completed < posted; ++completed) {
    ASSERT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_WR_FLUSH_ERR);
  }

  // The device still works, with a new QP and a new peer.
  Peer next({.device = GetParam()});
  Endpoint again(device);
  again.connect(next.address());
  next.connect(again.address());
  region.fill(6);
  ASSERT_EQ(post(again.qp(), IBV_WR_RDMA_WRITE, {region.sge(0, 4096)}, next.target(1)), 0);
  EXPECT_EQ(poll_one(again.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(next.find_wrong_byte(0, 4096, 6), std::nullopt);
}

TEST(Processes, ManyPeersAtOnce_TransferCorrectly) {
  const Device device = open_device();
  const Region region(device.pd.get(), 6 * 8192);
  region.fill(1);
  std::vector<std::unique_ptr<Peer>> peers;
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  for (unsigned i = 0; i < 6; ++i) {
    peers.push_back(std::make_unique<Peer>(Peer::Options{.device = i % 2, .qps = 4}));
    for (std::uint32_t qp = 0; qp < 4; ++qp) {
      endpoints.push_back(std::make_unique<Endpoint>(device));
      endpoints.back()->connect(peers[i]->address(qp));
      peers[i]->connect(endpoints.back()->address(), qp);
    }
  }
  for (std::size_t i = 0; i < endpoints.size(); ++i) {
    ASSERT_EQ(
        post(endpoints[i]->qp(), IBV_WR_RDMA_WRITE, {region.sge(0, 4096)}, peers[i / 4]->target(i, 4096 * (i % 4))), 0);
  }
  for (std::size_t i = 0; i < endpoints.size(); ++i) {
    const ibv_wc wc = poll_one(endpoints[i]->send_cq());
    EXPECT_EQ(wc.wr_id, i);
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(peers[i / 4]->find_wrong_byte(4096 * (i % 4), 4096, 1), std::nullopt);
  }
}

// Two programs that poll without pause share two cores with the threads of their devices, so an empty poll must yield
// the processor. A poller that does not yield uses its whole time slice of several milliseconds again and again. The
// test counts the exchanges that used so much processor time: where a host takes the processor away from a virtual
// machine, that time is charged to a few of them.
TEST(Processes, BusyPolling_LeavesTimeForTheDevice) {
  Peer first({.cores = 2});
  Peer second({.cores = 2});
  first.connect(second.address());
  second.connect(first.address());
  for (std::uint64_t i = 0; i < 4; ++i) {
    ASSERT_EQ(first.post_recv(0, 0, i), 0);
    ASSERT_EQ(second.post_recv(0, 0, i), 0);
  }
  constexpr std::uint32_t kExchanges = 200;
  second.start_echo(kExchanges);
  EXPECT_LT(first.ping(kExchanges, 1ms), kExchanges / 5);
  second.await_echo();
}

// The exit of a forked child (a shell command, a worker) must not destroy the objects of the parent.
TEST(Processes, ForkedChildExit_DoesNotAffectTheParent) {
  const Device device = open_device();
  const Region region(device.pd.get(), 8192);
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  Peer peer;
  Endpoint c(device);
  c.connect(peer.address());
  peer.connect(c.address());
  for (const bool clean : {false, true}) {
    std::fflush(nullptr);  // otherwise the child's exit would print the buffered output again
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) clean ? std::exit(0) : _exit(0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status));
    region.fill(clean ? 1 : 2);
    ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {region.sge(0, 64)},
                   {.remote_addr = region.address(4096), .rkey = region.mr->rkey}),
              0);
    EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
    ASSERT_EQ(post(c.qp(), IBV_WR_RDMA_WRITE, {region.sge(0, 4096)}, peer.target(1)), 0);
    EXPECT_EQ(poll_one(c.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(peer.find_wrong_byte(0, 4096, clean ? 1 : 2), std::nullopt);
  }
}

// A worker that was forked after its parent had opened a device opens a device itself.
TEST(Processes, ForkedChild_OpensItsOwnDevice) {
  const Device inherited = open_device();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    try {
      _exit(write_in_child(open_device()));
    } catch (const std::exception&) {
      _exit(2);
    }
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// Opening a device succeeds while other processes exit.
TEST(Processes, OpenWhileOthersExit_Succeeds) {
  const Device inherited = open_device();
  std::fflush(nullptr);  // otherwise the children's exits would print the buffered output again
  std::vector<pid_t> children;
  for (int i = 0; i < 24; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);
      ibv_device** const list = verbs().get_device_list(nullptr);
      ibv_context* const context = list != nullptr ? verbs().open_device(list[0]) : nullptr;
      if (context == nullptr) _exit(1);
      verbs().close_device(context);
      verbs().free_device_list(list);
      std::exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
}

std::set<std::string> shared_memory_names() {
  std::set<std::string> names;
  const char* const name_space = std::getenv("SOFTVERBS_NAMESPACE");
  if (!std::filesystem::exists("/dev/shm")) return names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (name_space == nullptr || name.find(name_space) != std::string::npos) names.insert(name);
  }
  return names;
}

// A peer makes the descriptor of a completion channel and of a context readable, once for each event.
TEST(Processes, EventsCausedByPeer_AreDelivered) {
  const Device device = open_device();
  const Region region(device.pd.get(), 64);
  const Channel channel(verbs().create_comp_channel(device.context.get()));
  const Cq cq(verbs().create_cq(device.context.get(), 16, nullptr, channel.get(), 0));
  ASSERT_NE(cq, nullptr);
  Endpoint endpoint(device, {.recv_cq = cq.get()});
  Peer peer;
  endpoint.connect(peer.address());
  peer.connect(endpoint.address());
  constexpr unsigned kEvents = 3;
  for (unsigned round = 0; round < 2; ++round) {
    for (unsigned event = 0; event < kEvents; ++event) {
      ASSERT_EQ(post_recv(endpoint.qp(), {region.sge()}, event), 0);
      ASSERT_EQ(ibv_req_notify_cq(cq.get(), 0), 0);
      ASSERT_EQ(peer.post(IBV_WR_SEND, 0, 64, {.wr_id = event}), 0);
      EXPECT_EQ(peer.poll_sent().status, IBV_WC_SUCCESS);
      EXPECT_EQ(poll_one(cq.get()).status, IBV_WC_SUCCESS);
    }
    for (unsigned event = 0; event < kEvents; ++event) {
      ASSERT_TRUE(readable(channel->fd, kCompletionTimeout)) << event;
      ibv_cq* event_cq = nullptr;
      void* context = nullptr;
      ASSERT_EQ(verbs().get_cq_event(channel.get(), &event_cq, &context), 0);
      EXPECT_EQ(event_cq, cq.get());
      verbs().ack_cq_events(event_cq, 1);
    }
    EXPECT_FALSE(readable(channel->fd, 20ms));
  }
  ASSERT_EQ(peer.post(IBV_WR_RDMA_WRITE, 0, 64, {.wr_id = 9, .remote_addr = region.address(), .rkey = 1}), 0);
  EXPECT_EQ(peer.poll_sent().status, IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(expect_async_event(device.context.get(), IBV_EVENT_QP_ACCESS_ERR).qp, endpoint.qp());
}

TEST(Processes, KilledProcesses_LeaveNoFiles) {
  const Device device = open_device();
  int round = 0;
  const auto kill_one_in_traffic = [&] {
    const Region region(device.pd.get(), 1 << 16);
    Endpoint endpoint(device, {.timers = kProcessTimers});
    Peer peer;
    endpoint.connect(peer.address());
    peer.connect(endpoint.address());
    for (std::uint64_t i = 0; i < 64; ++i) ASSERT_EQ(post_recv(endpoint.qp(), {region.sge()}, i), 0);
    for (std::uint64_t i = 0; i < 16; ++i) ASSERT_EQ(peer.post_recv(0, 64, i), 0);
    peer.stream({.remote_addr = region.address(), .rkey = region.mr->rkey});
    for (std::uint64_t i = 0; i < 16; ++i) {
      ASSERT_EQ(post(endpoint.qp(), i % 2 == 0 ? IBV_WR_SEND : IBV_WR_RDMA_READ, {region.sge(0, 64)}, peer.target(i)),
                0);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(1000 + 700 * round++));
    peer.kill();
    endpoint.to_error();
    for (std::uint64_t i = 0; i < 16; ++i) ASSERT_NE(poll_one(endpoint.send_cq()).wr_id, kNoWr);
    for (std::uint64_t i = 0; i < 64; ++i) ASSERT_NE(poll_one(endpoint.recv_cq()).wr_id, kNoWr);
  };
  for (int i = 0; i < 2; ++i) kill_one_in_traffic();
  const std::size_t before = shared_memory_names().size();
  for (int i = 0; i < 10; ++i) kill_one_in_traffic();
  const Peer last;  // removes the files of dead processes
  EXPECT_LE(shared_memory_names().size(), before + 1);
}

// When the system forbids writing to another process, the copier thread of that process copies. With the inline engine
// there is no such thread, and the WRITE fails.
TEST(CrossMemory, Forbidden_IsReplacedByCopier_OrRefused) {
  const Device device = open_device();
  const Region region(device.pd.get(), 1 << 20);
  region.fill(3);
  Endpoint endpoint(device);
  Peer peer({.region_bytes = 1 << 20});
  endpoint.connect(peer.address());
  peer.connect(endpoint.address());
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {region.sge()}, peer.target(1)), 0);
  const bool is_refused = is_cross_memory_forbidden() && is_inline();
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, is_refused ? IBV_WC_REM_OP_ERR : IBV_WC_SUCCESS);
  EXPECT_EQ(peer.find_wrong_byte(0, 1 << 20, 3).has_value(), is_refused);
}

// Stops the thread with this name in another process; the other threads of that process run on.
class StoppedThread {
 public:
  StoppedThread(int pid, std::string_view name) {
    for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task")) {
      std::string found;
      std::getline(std::ifstream(task.path() / "comm"), found);
      if (found == name) thread_ = std::stoi(task.path().filename());
    }
    if (thread_ == 0) throw std::runtime_error("no such thread");
    is_stopped_ = ptrace(PTRACE_SEIZE, thread_, 0, 0) == 0;
    if (!is_stopped_) return;
    EXPECT_EQ(ptrace(PTRACE_INTERRUPT, thread_, 0, 0), 0);
    EXPECT_EQ(waitpid(thread_, nullptr, __WALL), thread_);
  }
  ~StoppedThread() { resume(); }
  StoppedThread(const StoppedThread&) = delete;
  StoppedThread& operator=(const StoppedThread&) = delete;

  bool is_stopped() const { return is_stopped_; }  // false: the system forbids ptrace
  void resume() {
    if (!std::exchange(is_stopped_, false)) return;
    EXPECT_EQ(ptrace(PTRACE_DETACH, thread_, 0, 0), 0);
  }

 private:
  pid_t thread_ = 0;
  bool is_stopped_ = false;
};

// A sender passes bytes to the receiver's copier thread and dies. The bytes may be written before the receiver's
// deregistration returns, but not later. The test stops the copier thread until the sender is dead and the receiver
// waits.
TEST(CrossMemory, CopyOfDeadSender_EndsBeforeDeregistration) {
  if (is_inline() || !is_cross_memory_forbidden()) GTEST_SKIP() << "needs a copier thread in the receiver";
  constexpr std::size_t kBytes = 64 << 10;
  bool was_written = false;
  for (const auto end = Clock::now() + kCompletionTimeout; !was_written && Clock::now() < end;) {
    Peer receiver({.region_bytes = kBytes});
    Peer sender({.region_bytes = kBytes});
    receiver.connect(sender.address());
    sender.connect(receiver.address());
    ASSERT_EQ(sender.post(IBV_WR_RDMA_WRITE, 0, 8, receiver.target(1)), 0);  // starts the copier thread
    ASSERT_EQ(sender.poll_sent().status, IBV_WC_SUCCESS);
    sender.fill(0, kBytes, 5);
    StoppedThread copier(receiver.pid(), "softverbs-copy");
    if (!copier.is_stopped()) GTEST_SKIP() << "ptrace is forbidden";
    ASSERT_EQ(sender.post(IBV_WR_RDMA_WRITE, 0, kBytes, receiver.target(2)), 0);
    std::this_thread::sleep_for(100ms);  // the sender passes the bytes in this time; if not, the loop repeats
    sender.kill();
    receiver.start_deregistering(0, kBytes, 5);
    const bool is_early = receiver.replies_within(100ms);
    copier.resume();
    was_written = receiver.await_deregistered();
    EXPECT_FALSE(is_early && was_written);  // deregistration waits for the copier thread
    std::this_thread::sleep_for(20ms);      // time for a wrong late write
    ASSERT_TRUE(receiver.untouched_outside(0, 0));
  }
  EXPECT_TRUE(was_written);
}

// A receiver that is stopped for longer than the timeout of a copy by its thread, and then continues.
TEST(CrossMemory, StoppedReceiver_GetsTheMessageLater) {
  if (is_inline() || !is_cross_memory_forbidden()) GTEST_SKIP() << "needs a copier thread in the receiver";
  constexpr std::size_t kBytes = 3 << 20;
  const Device device = open_device();
  const Region region(device.pd.get(), kBytes);
  region.fill(4);
  Endpoint endpoint(device, {.timers = {.timeout = 16}});
  Peer peer({.region_bytes = kBytes});
  endpoint.connect(peer.address());
  peer.connect(endpoint.address());
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {region.sge(0, 8)}, peer.target(1)), 0);
  ASSERT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
  ASSERT_EQ(peer.post_recv(0, kBytes, 2), 0);
  peer.stop();
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_SEND, {region.sge()}, {.wr_id = 3}), 0);
  std::this_thread::sleep_for(1200ms);
  peer.resume();
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
  const ibv_wc received = peer.poll_received();
  EXPECT_EQ(received.status, IBV_WC_SUCCESS);
  EXPECT_EQ(received.wr_id, 2U);
  EXPECT_EQ(received.byte_len, kBytes);
  EXPECT_EQ(peer.find_wrong_byte(0, kBytes, 4), std::nullopt);
}

}  // namespace
}  // namespace verbatim::test
