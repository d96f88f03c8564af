// Which operations order the payloads of WRITEs. With SOFTVERBS_ORDERING=adaptive-routing the device keeps only the
// order that the InfiniBand specification guarantees (volume 1, chapter 9.5), so that programs that rely on more fail.
// By default it keeps posting order.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "support/verbs_fixture.h"
#include "support/verbs_peer.h"

namespace verbatim::test {
namespace {

bool is_set(const char* name, std::string_view value) {
  const char* text = std::getenv(name);
  return text != nullptr && value == text;
}

class Ordering : public testing::Test {
 protected:
  static constexpr std::size_t kDataBytes = 1024;
  static constexpr std::size_t kFlag = 2048;  // offset of a word after the data
  static constexpr std::size_t kAtomic = 2048 + 512;
  static constexpr unsigned kRounds = 300;

  Ordering() { connect(a, b); }

  SendOptions to(std::size_t offset, unsigned flags = 0) const {
    return {.flags = flags, .remote_addr = target.address(offset), .rkey = target.mr->rkey};
  }
  // Posts an unsignaled WRITE of the contents of this round.
  void write_data(std::uint64_t round) {
    fill_pattern(source.bytes(0, kDataBytes), round);
    ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, kDataBytes)}, to(0)), 0);
  }
  bool is_whole(std::uint64_t round) const { return !find_wrong_byte(target.bytes(0, kDataBytes), round); }
  std::uint64_t word(std::size_t offset) const {
    return std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(target.buffer.data() + offset)).load();
  }
  void set_flag_source(std::uint64_t round) { std::memcpy(source.buffer.data() + kFlag, &round, sizeof round); }

  // A deliberate mistake: announces the data with a plain WRITE of a flag after it, and checks the data as soon as the
  // flag is seen. True when the data was not complete then.
  bool is_flag_ahead_of_data(std::uint64_t round) {
    write_data(round);
    set_flag_source(round);
    EXPECT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {source.sge(kFlag, 8)}, to(kFlag, IBV_SEND_SIGNALED)), 0);
    bool was_whole = true;
    bool seen = false;
    bool completed = false;
    ibv_wc wc{};
    const auto deadline = std::chrono::steady_clock::now() + kCompletionTimeout;
    while (!completed && std::chrono::steady_clock::now() < deadline) {
      if (!seen && word(kFlag) == round) {
        seen = true;
        was_whole = is_whole(round);
      }
      completed = ibv_poll_cq(a.send_cq(), 1, &wc) == 1;
    }
    EXPECT_TRUE(completed);
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_TRUE(is_whole(round)) << "after the completion";
    EXPECT_EQ(word(kFlag), round);
    return !was_whole;
  }

  const bool any_order = is_set("SOFTVERBS_ORDERING", "adaptive-routing");
  const bool is_inline = is_set("SOFTVERBS_ENGINE", "inline");
  const Device device = open_device();
  const Region source{device.pd.get(), 8192};
  const Region target{device.pd.get(), 8192, 0, kAllAccess | IBV_ACCESS_REMOTE_ATOMIC};
  Endpoint a{device, {.access = kAllAccess | IBV_ACCESS_REMOTE_ATOMIC}};
  Endpoint b{device, {.access = kAllAccess | IBV_ACCESS_REMOTE_ATOMIC}};
};

TEST_F(Ordering, FlagByPlainWrite_PrecedesData_WithAdaptiveRouting) {
  unsigned violations = 0;
  for (std::uint64_t round = 1; round <= kRounds; ++round) violations += is_flag_ahead_of_data(round) ? 1U : 0U;
  if (any_order) {
    EXPECT_GT(violations, 0U);
  } else {
    EXPECT_EQ(violations, 0U);
  }
}

TEST_F(Ordering, LastByteOfMessage_PrecedesTheRest) {
  if (!any_order) GTEST_SKIP() << "needs adaptive routing";
  unsigned violations = 0;
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    fill_pattern(source.bytes(0, kDataBytes), round);
    const std::uint64_t last = round | std::uint64_t{1} << 63;
    std::memcpy(source.buffer.data() + kDataBytes - 8, &last, sizeof last);
    ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, kDataBytes)}, to(0, IBV_SEND_SIGNALED)), 0);
    bool seen = false;
    ibv_wc wc{};
    do {
      if (seen || word(kDataBytes - 8) != last) continue;
      seen = true;
      if (find_wrong_byte(target.bytes(0, kDataBytes - 8), round)) ++violations;
    } while (ibv_poll_cq(a.send_cq(), 1, &wc) == 0);
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
  }
  EXPECT_GT(violations, 0U);
}

TEST_F(Ordering, Immediate_ArrivesAfterEarlierWrites) {
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    ASSERT_EQ(post_recv(b.qp(), {}), 0);
    write_data(round);
    set_flag_source(round);
    ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, {source.sge(kFlag, 8)}, to(kFlag, IBV_SEND_SIGNALED)), 0);
    ASSERT_EQ(poll_one(b.recv_cq()).status, IBV_WC_SUCCESS);
    ASSERT_TRUE(is_whole(round)) << round;
    ASSERT_EQ(word(kFlag), round);
    ASSERT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
  }
}

TEST_F(Ordering, Send_ArrivesAfterEarlierWrites) {
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    ASSERT_EQ(post_recv(b.qp(), {target.sge(4096, 64)}), 0);
    write_data(round);
    ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, 64)}, {}), 0);
    ASSERT_EQ(poll_one(b.recv_cq()).status, IBV_WC_SUCCESS);
    ASSERT_TRUE(is_whole(round)) << round;
    ASSERT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
  }
}

TEST_F(Ordering, Atomic_ExecutesAfterEarlierWrites) {
  std::memset(target.buffer.data() + kAtomic, 0, 8);
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    write_data(round);
    ibv_sge sge = source.sge(4096, 8);
    ibv_send_wr wr{};
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.atomic = {target.address(kAtomic), 1, 0, target.mr->rkey};
    ibv_send_wr* bad = nullptr;
    ASSERT_EQ(ibv_post_send(a.qp(), &wr, &bad), 0);
    const auto deadline = std::chrono::steady_clock::now() + kCompletionTimeout;
    while (word(kAtomic) != round) ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    ASSERT_TRUE(is_whole(round)) << round;
    ASSERT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
  }
}

TEST_F(Ordering, Read_ReturnsEarlierWrites) {
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    write_data(round);
    ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_READ, {source.sge(4096, kDataBytes)}, to(0, IBV_SEND_SIGNALED)), 0);
    ASSERT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
    ASSERT_EQ(find_wrong_byte(source.bytes(4096, kDataBytes), round), std::nullopt);
  }
}

TEST_F(Ordering, UnsignaledWrite_ArrivesEventually) {
  for (std::uint64_t round = 1; round <= 20; ++round) {
    write_data(round);
    const auto deadline = std::chrono::steady_clock::now() + kCompletionTimeout;
    while (!is_whole(round)) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      ASSERT_TRUE(!is_inline || stays_empty(b.recv_cq(), 0ms));  // any poll of the process drives the inline engine
    }
  }
}

TEST_F(Ordering, PostSendReturned_DataMayBeMissing) {
  if (!any_order || !is_inline) GTEST_SKIP() << "needs adaptive routing and the inline engine";
  unsigned missing = 0;
  for (std::uint64_t round = 1; round <= 20; ++round) {
    write_data(round);
    if (!is_whole(round)) ++missing;
  }
  EXPECT_GT(missing, 0U);
}

TEST_F(Ordering, Completions_KeepPostingOrder) {
  for (std::uint64_t i = 0; i < 500; ++i) {
    SendOptions options = to(0, i % 3 == 0 ? IBV_SEND_SIGNALED : 0);
    options.wr_id = i;
    ASSERT_EQ(post(a.qp(), i % 7 == 0 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, {source.sge(0, 100)}, options), 0);
    ASSERT_TRUE(i % 3 != 0 || poll_one(a.send_cq()).wr_id == i);
  }
}

// The target is deregistered while a WRITE is not complete. The WRITE fails or was executed before; no byte is written
// after the deregistration.
TEST_F(Ordering, DeregisteredTarget_ReceivesNothing) {
  for (std::uint64_t round = 1; round <= 50; ++round) {
    Endpoint near(device);
    Endpoint far(device);
    connect(near, far);
    auto region = std::make_unique<Region>(device.pd.get(), kDataBytes);
    GuardedBuffer& memory = region->buffer;
    fill_pattern(source.bytes(0, kDataBytes), round);
    const SendOptions options{.wr_id = round, .remote_addr = region->address(), .rkey = region->mr->rkey};
    ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, kDataBytes)}, options), 0);
    region->mr.reset();
    memory.poison();
    const ibv_wc wc = poll_one(near.send_cq());
    EXPECT_TRUE(wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_REM_ACCESS_ERR) << wc.status;
    EXPECT_EQ(memory.untouched_outside(0, 0), "");
    EXPECT_EQ(far.state(), wc.status == IBV_WC_SUCCESS ? IBV_QPS_RTS : IBV_QPS_ERR);
    if (wc.status != IBV_WC_SUCCESS) expect_async_event(device.context.get(), IBV_EVENT_QP_ACCESS_ERR);
  }
}

// The same for the QP: after ibv_destroy_qp has returned, at either end, its WRITEs write no bytes.
TEST_F(Ordering, DestroyedQp_WritesNothing) {
  for (std::uint64_t round = 1; round <= 50; ++round) {
    Endpoint near(device, {.timers = {.timeout = 1, .retry_count = 1}});
    Endpoint far(device);
    connect(near, far);
    write_data(round);
    const SendOptions options{.wr_id = round, .remote_addr = target.address(4096), .rkey = target.mr->rkey};
    ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, kDataBytes)}, options), 0);
    Endpoint& destroyed = round % 2 == 0 ? near : far;
    destroyed.destroy();
    std::memset(target.buffer.data() + 4096, 0x5a, kDataBytes);
    if (round % 2 != 0) {
      const ibv_wc wc = poll_one(near.send_cq());
      EXPECT_TRUE(wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_RETRY_EXC_ERR) << wc.status;
    } else {
      EXPECT_TRUE(stays_empty(b.recv_cq(), 1ms));
    }
    for (const std::byte byte : target.bytes(4096, kDataBytes)) ASSERT_EQ(byte, std::byte{0x5a});
  }
}

// Every request that is not complete when the QP fails gets a completion, in order, also an unsignaled one.
TEST_F(Ordering, ErrorState_FlushesIncompleteWrites) {
  for (unsigned round = 0; round < 20; ++round) {
    Endpoint near(device);
    Endpoint far(device);
    connect(near, far);
    for (std::uint64_t i = 0; i < 10; ++i) {
      SendOptions options = to(0, i % 2 == 0 ? IBV_SEND_SIGNALED : 0);
      options.wr_id = i;
      ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, 64)}, options), 0);
    }
    near.to_error();
    std::uint64_t next = 0;
    bool failed = false;
    while (next < 10) {
      ibv_wc wc{};
      if (ibv_poll_cq(near.send_cq(), 1, &wc) == 0) break;
      ASSERT_GE(wc.wr_id, next);
      ASSERT_LE(wc.wr_id, next + 1);
      ASSERT_TRUE(wc.wr_id == next || wc.wr_id % 2 == 0) << "an unsignaled request was flushed without a completion";
      ASSERT_TRUE(!failed || wc.wr_id == next);
      failed = wc.status != IBV_WC_SUCCESS;
      ASSERT_TRUE(!failed || wc.status == IBV_WC_WR_FLUSH_ERR);
      next = wc.wr_id + 1;
    }
    EXPECT_GE(next, 9U);
  }
}

// A WRITE that the peer rejects does not fail earlier WRITEs.
TEST_F(Ordering, RefusedWrite_DoesNotFailEarlierOnes) {
  for (std::uint64_t round = 1; round <= 20; ++round) {
    Endpoint near(device);
    Endpoint far(device);
    connect(near, far);
    fill_pattern(source.bytes(0, kDataBytes), round);
    ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, kDataBytes)}, to(0, IBV_SEND_SIGNALED)), 0);
    SendOptions wrong = to(0, 0);
    wrong.rkey ^= 0x100;
    wrong.wr_id = 1;
    ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, 8)}, wrong), 0);
    const ibv_wc first = poll_one(near.send_cq());
    EXPECT_EQ(first.status, IBV_WC_SUCCESS);
    EXPECT_EQ(first.wr_id, 0U);
    EXPECT_TRUE(is_whole(round));
    EXPECT_EQ(poll_one(near.send_cq()).status, IBV_WC_REM_ACCESS_ERR);
    expect_async_event(device.context.get(), IBV_EVENT_QP_ACCESS_ERR);
  }
}

TEST_F(Ordering, DeadPeer_FailsTheOldestWrite) {
  Endpoint near(device, {.timers = {.timeout = 15, .retry_count = 1}});  // 134 ms: the peer may be on a busy machine
  Peer peer;
  near.connect(peer.address());
  peer.connect(near.address());
  ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, 8)}, peer.target(0)), 0);
  ASSERT_EQ(poll_one(near.send_cq()).status, IBV_WC_SUCCESS);
  peer.stop();
  for (std::uint64_t i = 1; i <= 5; ++i) {
    SendOptions options = peer.target(i);
    options.flags = 0;
    ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, 64)}, options), 0);
  }
  peer.kill();
  ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, 64)}, peer.target(6)), 0);
  std::uint64_t next = kNoWr;
  bool failed = false;
  while (next != 6) {
    const ibv_wc wc = poll_one(near.send_cq());
    ASSERT_NE(wc.wr_id, kNoWr);
    ASSERT_EQ(wc.status, failed ? IBV_WC_WR_FLUSH_ERR : IBV_WC_RETRY_EXC_ERR);
    ASSERT_TRUE(!failed || wc.wr_id == next + 1);
    failed = true;
    next = wc.wr_id;
  }
}

}  // namespace
}  // namespace verbatim::test
