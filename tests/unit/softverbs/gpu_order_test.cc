//: in softverbs_gpu_test

// Completions and order of RDMA operations on GPU memory. The copies of the stand-in for CUDA are late, so that what
// does not wait for their end is found out.
#include <gtest/gtest.h>

#include <algorithm>

#include "gpu_fixture.h"

namespace verbatim::test {
namespace {

constexpr unsigned kLateUs = 200;
constexpr std::size_t kPieces = 32;
constexpr std::size_t kPieceBytes = 20'000;

struct OrderRoute {
  Place from;
  Place to;
};

std::string order_route_name(const testing::TestParamInfo<OrderRoute>& info) {
  return name_of(info.param.from) + "To" + name_of(info.param.to);
}

void expect_statuses(ibv_cq* cq, std::size_t successes, ibv_wc_status error, std::size_t flushed) {
  const std::vector<ibv_wc> found = poll(cq, successes + 1 + flushed);
  ASSERT_EQ(found.size(), successes + 1 + flushed);
  for (std::size_t i = 0; i < found.size(); ++i) {
    const ibv_wc_status expected = i < successes ? IBV_WC_SUCCESS : i == successes ? error : IBV_WC_WR_FLUSH_ERR;
    EXPECT_EQ(found[i].status, expected) << i;
    EXPECT_EQ(found[i].wr_id, i);
  }
}

class GpuOrder : public testing::TestWithParam<OrderRoute> {
 protected:
  void SetUp() override { VERBATIM_NEEDS_STANDIN(); }

  GpuPair pair{GetParam().from, GetParam().to, kPieces* kPieceBytes};
};

INSTANTIATE_TEST_SUITE_P(Route, GpuOrder,
                         testing::Values(OrderRoute{kHost, kLegacy0}, OrderRoute{kLegacy0, kHost},
                                         OrderRoute{kLegacy0, kLegacy0}, OrderRoute{kExportable0, kExportable1},
                                         OrderRoute{kPrivate1, kPrivate0}),
                         order_route_name);

TEST_P(GpuOrder, Completion_MeansThatTheBytesAreThere) {
  const SlowCopies slow(kLateUs);
  for (std::uint64_t round = 1; round <= 5; ++round) {
    pair.source.fill(0, kPieceBytes, round);
    ASSERT_EQ(pair.post_write(0, kPieceBytes), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(pair.target.find_wrong_byte(0, kPieceBytes, round), std::nullopt) << "WRITE";
    pair.source.fill(0, kPieceBytes, round + 100);
    ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge(0, kPieceBytes)}), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_SEND, {pair.source.sge(0, kPieceBytes)}), 0);
    EXPECT_EQ(poll_one(pair.b.recv_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(pair.target.find_wrong_byte(0, kPieceBytes, round + 100), std::nullopt) << "SEND";
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    pair.target.fill(0, kPieceBytes, round + 200);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_READ, {pair.source.sge(0, kPieceBytes)}, pair.target.target()), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(pair.source.find_wrong_byte(0, kPieceBytes, round + 200), std::nullopt) << "READ";
  }
}

TEST_P(GpuOrder, ManyWritesInFlight_CompleteInOrderWithTheirBytes) {
  const SlowCopies slow(kLateUs);
  pair.source.fill(7);
  for (std::size_t i = 0; i < kPieces; ++i) ASSERT_EQ(post_recv(pair.b.qp(), {}, i), 0);
  std::vector<std::byte> expected = pair.source.read(0, pair.source.size());
  for (std::size_t i = 0; i < kPieces; ++i) {
    ASSERT_EQ(pair.post_write(i * kPieceBytes, kPieceBytes, i, IBV_WR_RDMA_WRITE_WITH_IMM), 0);
  }
  for (std::size_t i = 0; i < kPieces; ++i) {
    const ibv_wc wc = poll_one(pair.b.recv_cq());
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, i);
    EXPECT_EQ(wc.imm_data, i);
    const std::vector<std::byte> arrived = pair.target.read(i * kPieceBytes, kPieceBytes);
    EXPECT_TRUE(std::equal(arrived.begin(), arrived.end(), expected.data() + i * kPieceBytes)) << "piece " << i;
  }
  const std::vector<ibv_wc> sent = poll(pair.a.send_cq(), kPieces);
  ASSERT_EQ(sent.size(), kPieces);
  for (std::size_t i = 0; i < kPieces; ++i) {
    EXPECT_EQ(sent[i].wr_id, i);
    EXPECT_EQ(sent[i].status, IBV_WC_SUCCESS);
  }
}

// As NCCL does: data, then an empty WRITE with immediate.
TEST_P(GpuOrder, EmptyImmediate_ArrivesAfterTheData) {
  const SlowCopies slow(kLateUs);
  for (std::uint64_t round = 1; round <= 5; ++round) {
    pair.source.fill(round);
    ASSERT_EQ(post_recv(pair.b.qp(), {}), 0);
    ASSERT_EQ(pair.post_write(0, pair.source.size()), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, {}), 0);
    EXPECT_EQ(poll_one(pair.b.recv_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(pair.target.find_wrong_byte(0, pair.target.size(), round), std::nullopt);
    for (const ibv_wc& wc : poll(pair.a.send_cq(), 2)) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  }
}

TEST_P(GpuOrder, ReadAndSendAfterWrite_FindItsBytes) {
  const SlowCopies slow(kLateUs);
  const PlacedRegion back(pair.device.pd.get(), kLegacy1, pair.source.size());
  for (std::uint64_t round = 1; round <= 4; ++round) {
    pair.source.fill(round);
    ASSERT_EQ(pair.post_write(0, pair.source.size()), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_READ, {back.sge()}, pair.target.target()), 0);
    for (const ibv_wc& wc : poll(pair.a.send_cq(), 2)) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(back.find_wrong_byte(0, back.size(), round), std::nullopt);
    // The SEND overwrites the end of what the WRITE has written.
    pair.source.fill(round + 50);
    ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge(kPieceBytes, 64)}), 0);
    ASSERT_EQ(pair.post_write(0, 2 * kPieceBytes), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_SEND, {pair.source.sge(0, 64)}), 0);
    EXPECT_EQ(poll_one(pair.b.recv_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(pair.target.find_wrong_byte(0, kPieceBytes, round + 50), std::nullopt);
    EXPECT_EQ(pair.target.find_wrong_byte(kPieceBytes, 64, round + 50), std::nullopt);
    for (const ibv_wc& wc : poll(pair.a.send_cq(), 2)) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  }
}

// Several WRITEs to the same bytes: the last one stays.
TEST_P(GpuOrder, WritesToTheSameBytes_LeaveTheLast) {
  if (!keeps_order()) GTEST_SKIP() << "adaptive routing does not keep this order";
  const SlowCopies slow(kLateUs);
  pair.source.fill(9);
  const std::vector<std::byte> last = pair.source.read((kPieces - 1) * kPieceBytes, kPieceBytes);
  for (unsigned round = 0; round < 2; ++round) {
    pair.target.poison();
    for (std::size_t i = 0; i < kPieces; ++i) {
      ASSERT_EQ(
          post(pair.a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge(i * kPieceBytes, kPieceBytes)}, pair.target.target(i)),
          0);
    }
    ASSERT_EQ(poll(pair.a.send_cq(), kPieces).size(), kPieces);
    EXPECT_EQ(pair.target.read(0, kPieceBytes), last);
    EXPECT_EQ(pair.target.untouched_outside(0, kPieceBytes), "");
  }
}

// A program that polls memory of the target may rely on the order of separately posted WRITEs. `from`, `to`: of the
// data. The flag is the last word of a WRITE from the host.
struct FlagRoute {
  Place from;
  Place to;
  Place flag;
  std::size_t flag_bytes = 8;
};

std::string flag_route_name(const testing::TestParamInfo<FlagRoute>& info) {
  return name_of(info.param.from) + "To" + name_of(info.param.to) + "FlagIn" + name_of(info.param.flag) +
         (info.param.flag_bytes > 8 ? "Long" : "");
}

class GpuFlag : public testing::TestWithParam<FlagRoute> {
 protected:
  void SetUp() override {
    VERBATIM_NEEDS_STANDIN();
    if (!keeps_order()) GTEST_SKIP() << "adaptive routing does not keep this order";
  }
  std::uint64_t read_flag() const {
    if (GetParam().flag.is_gpu()) return flag.read_word(flag_offset);
    return std::atomic_ref(*reinterpret_cast<std::uint64_t*>(flag.address(flag_offset)))
        .load(std::memory_order_acquire);
  }

  GpuPair pair{GetParam().from, GetParam().to, kPieces* kPieceBytes};
  const std::size_t flag_offset = GetParam().flag_bytes - 8;
  PlacedRegion flag_source{pair.device.pd.get(), kHost, GetParam().flag_bytes};
  PlacedRegion flag{pair.device.pd.get(), GetParam().flag, GetParam().flag_bytes};
};

INSTANTIATE_TEST_SUITE_P(
    Route, GpuFlag,
    testing::Values(FlagRoute{kHost, kLegacy0, kLegacy0}, FlagRoute{kHost, kLegacy0, kHost},
                    FlagRoute{kLegacy0, kHost, kHost}, FlagRoute{kLegacy0, kExportable1, kHost, 1 << 16},
                    FlagRoute{kLegacy0, kLegacy0, kLegacy0}, FlagRoute{kLegacy0, kExportable1, kHost},
                    FlagRoute{kLegacy0, kExportable1, kLegacy0}, FlagRoute{kPrivate1, kPrivate0, kPrivate1}),
    flag_route_name);

TEST_P(GpuFlag, SeparatelyPostedFlag_FollowsTheData) {
  const SlowCopies slow(kLateUs);
  flag.write_word(flag_offset, 0);
  for (std::uint64_t round = 1; round <= 4; ++round) {
    pair.source.fill(round);
    flag_source.write_word(flag_offset, round);
    ASSERT_EQ(pair.post_write(0, pair.source.size()), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {flag_source.sge()}, flag.target()), 0);
    const auto end = std::chrono::steady_clock::now() + kCompletionTimeout;
    ibv_wc wc{};
    unsigned completed = 0;
    while (read_flag() != round && std::chrono::steady_clock::now() < end) {
      if (is_engine_inline()) completed += ibv_poll_cq(pair.a.send_cq(), 1, &wc) == 1 ? 1U : 0U;
    }
    EXPECT_EQ(read_flag(), round);
    EXPECT_EQ(pair.target.find_wrong_byte(0, pair.target.size(), round), std::nullopt);
    for (const ibv_wc& sent : poll(pair.a.send_cq(), 2 - completed)) EXPECT_EQ(sent.status, IBV_WC_SUCCESS);
  }
}

class GpuOrderBetweenProcesses : public testing::TestWithParam<OrderRoute> {
 protected:
  void SetUp() override { VERBATIM_NEEDS_STANDIN(); }

  GpuPeerPair pair{GetParam().from, GetParam().to, kPieces* kPieceBytes};
};

INSTANTIATE_TEST_SUITE_P(Route, GpuOrderBetweenProcesses,
                         testing::Values(OrderRoute{kHost, kPrivate0}, OrderRoute{kLegacy0, kExportable1},
                                         OrderRoute{kPrivate1, kPrivate0}, OrderRoute{kPrivate0, kHost}),
                         order_route_name);

TEST_P(GpuOrderBetweenProcesses, ManyWritesInFlight_CompleteInOrderWithTheirBytes) {
  const SlowCopies slow(kLateUs, &pair.peer);
  for (std::uint64_t round = 1; round <= 2; ++round) {
    for (std::size_t i = 0; i < kPieces; ++i) {
      pair.region.fill(i * kPieceBytes, kPieceBytes, round * 100 + i);
      ASSERT_EQ(pair.peer.post_recv(0, 0, i), 0);
    }
    for (std::size_t i = 0; i < kPieces; ++i) {
      ASSERT_EQ(pair.post_write(i * kPieceBytes, kPieceBytes, i, IBV_WR_RDMA_WRITE_WITH_IMM), 0);
    }
    // The inline engine of this process moves the bytes, while this process makes calls.
    std::vector<ibv_wc> sent;
    if (is_engine_inline()) sent = poll(pair.a.send_cq(), kPieces);
    for (std::size_t i = 0; i < kPieces; ++i) {
      const ibv_wc wc = pair.peer.poll_received();
      ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
      EXPECT_EQ(wc.imm_data, i);
      EXPECT_EQ(pair.peer.find_wrong_byte(i * kPieceBytes, kPieceBytes, round * 100 + i), std::nullopt) << i;
    }
    if (!is_engine_inline()) sent = poll(pair.a.send_cq(), kPieces);
    ASSERT_EQ(sent.size(), kPieces);
    for (std::size_t i = 0; i < kPieces; ++i) EXPECT_EQ(sent[i].wr_id, i);
  }
}

TEST_P(GpuOrderBetweenProcesses, CompletionAndRead_FindTheBytes) {
  const SlowCopies slow(kLateUs, &pair.peer);
  const PlacedRegion back(pair.device.pd.get(), kExportable1, 3 * kPieceBytes);
  for (std::uint64_t round = 1; round <= 4; ++round) {
    pair.region.fill(round);
    ASSERT_EQ(pair.post_write(0, back.size(), 1), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_READ, {back.sge()}, pair.peer.target(2)), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(pair.peer.find_wrong_byte(0, back.size(), round), std::nullopt);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(back.find_wrong_byte(0, back.size(), round), std::nullopt);
  }
}

class GpuPipeline : public testing::Test {
 protected:
  void SetUp() override { VERBATIM_NEEDS_STANDIN(); }

  int post_piece(std::size_t i, ibv_wr_opcode opcode = IBV_WR_RDMA_WRITE) const {
    return pair.post_write(i * kPieceBytes, kPieceBytes, i, opcode);
  }
  // The first pieces arrived, and nothing else did.
  void expect_pieces(std::size_t count, std::uint64_t seed) const {
    EXPECT_EQ(pair.target.find_wrong_byte(0, count * kPieceBytes, seed), std::nullopt);
    EXPECT_EQ(pair.target.untouched_outside(0, count * kPieceBytes), "");
  }

  GpuPair pair{kLegacy0, kExportable1, kPieces* kPieceBytes};
};

TEST_F(GpuPipeline, ReceivesPostedLate_ImmediatesArriveInOrder) {
  const SlowCopies slow(100);
  pair.source.fill(3);
  for (std::size_t i = 0; i < 5; ++i) ASSERT_EQ(post_recv(pair.b.qp(), {}, i), 0);
  for (std::size_t i = 0; i < kPieces; ++i) ASSERT_EQ(post_piece(i, IBV_WR_RDMA_WRITE_WITH_IMM), 0);
  for (std::size_t i = 0; i < kPieces; ++i) {
    const ibv_wc wc = poll_one(pair.b.recv_cq());
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.imm_data, i);
    if (i % 9 != 4 || i + 1 == kPieces) continue;
    EXPECT_TRUE(stays_empty(pair.b.recv_cq(), 5ms)) << "after " << i;
    for (std::size_t next = i + 1; next < i + 10; ++next) ASSERT_EQ(post_recv(pair.b.qp(), {}, next), 0);
  }
  const std::vector<ibv_wc> sent = poll(pair.a.send_cq(), kPieces);
  for (std::size_t i = 0; i < sent.size(); ++i) EXPECT_EQ(sent[i].wr_id, i);
  expect_pieces(kPieces, 3);
}

TEST_F(GpuPipeline, ReceivesMissing_RetriesAreExceededAfterTheEarlierWrites) {
  Endpoint a(pair.device, gpu_endpoint({.rnr_retry = 2, .min_rnr_timer = 1}));
  Endpoint b(pair.device, gpu_endpoint({.min_rnr_timer = 1}));
  connect(a, b);
  const SlowCopies slow(100);
  pair.source.fill(3);
  for (std::size_t i = 0; i < 5; ++i) ASSERT_EQ(post_recv(b.qp(), {}, i), 0);
  for (std::size_t i = 0; i < 8; ++i) {
    SendOptions options = pair.target.target(i, i * kPieceBytes);
    ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, {pair.source.sge(i * kPieceBytes, kPieceBytes)}, options), 0);
  }
  expect_statuses(a.send_cq(), 5, IBV_WC_RNR_RETRY_EXC_ERR, 2);
  EXPECT_EQ(poll(b.recv_cq(), 5).size(), 5U);
  EXPECT_EQ(pair.target.find_wrong_byte(0, 5 * kPieceBytes, 3), std::nullopt);
  // The sixth may have written its bytes before it needed a receive.
  EXPECT_EQ(pair.target.untouched_outside(0, 6 * kPieceBytes), "");
}

TEST_F(GpuPipeline, RemoteErrorAfterGoodWrites_ThoseCompleteFirst) {
  const SlowCopies slow(kLateUs);
  pair.source.fill(4);
  for (std::size_t i = 0; i < 8; ++i) ASSERT_EQ(post_piece(i), 0);
  SendOptions bad = pair.target.target(8);
  bad.rkey ^= 0x100;
  ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge(0, 64)}, bad), 0);
  for (std::size_t i = 9; i < 13; ++i) ASSERT_EQ(post_piece(i), 0);
  expect_statuses(pair.a.send_cq(), 8, IBV_WC_REM_ACCESS_ERR, 4);
  expect_pieces(8, 4);
  EXPECT_EQ(pair.a.state(), IBV_QPS_ERR);
  EXPECT_EQ(pair.b.state(), IBV_QPS_ERR);
}

TEST_F(GpuPipeline, LocalErrorAfterGoodWrites_ThoseCompleteFirst) {
  const SlowCopies slow(kLateUs);
  pair.source.fill(4);
  for (std::size_t i = 0; i < 8; ++i) ASSERT_EQ(post_piece(i), 0);
  ibv_sge bad = pair.source.sge(0, 64);
  bad.lkey ^= 0x100;
  ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {bad}, pair.target.target(8)), 0);
  for (std::size_t i = 9; i < 13; ++i) ASSERT_EQ(post_piece(i), 0);
  expect_statuses(pair.a.send_cq(), 8, IBV_WC_LOC_PROT_ERR, 4);
  expect_pieces(8, 4);
}

TEST_F(GpuPipeline, FirstWriteBad_NothingIsWritten) {
  SendOptions bad = pair.target.target(0, pair.target.size() - 63);
  ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge(0, 64)}, bad), 0);
  for (std::size_t i = 1; i < 4; ++i) ASSERT_EQ(post_piece(i), 0);
  expect_statuses(pair.a.send_cq(), 0, IBV_WC_REM_ACCESS_ERR, 3);
  expect_pieces(0, 0);
  EXPECT_EQ(pair.b.state(), IBV_QPS_ERR);
}

TEST_F(GpuPipeline, Drain_EndsWhenTheBytesAreThere) {
  pair.warm_up();
  pair.target.poison();
  const SlowCopies slow(kLateUs);
  pair.source.fill(5);
  for (std::size_t i = 0; i < kPieces; ++i) ASSERT_EQ(post_piece(i), 0);
  EXPECT_EQ(poll_one(pair.a.send_cq()).wr_id, 0U);  // others are under way now
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_SQD;
  attr.en_sqd_async_notify = 1;
  ASSERT_EQ(verbs().modify_qp(pair.a.qp(), &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
  expect_async_event(pair.device.context.get(), IBV_EVENT_SQ_DRAINED);
  std::size_t completed = 1;
  for (ibv_wc wc{}; ibv_poll_cq(pair.a.send_cq(), 1, &wc) == 1; ++completed) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_TRUE(stays_empty(pair.a.send_cq(), 5ms));
  // What was begun has arrived; later pieces have not been touched.
  expect_pieces(completed, 5);
  attr.qp_state = IBV_QPS_RTS;
  ASSERT_EQ(verbs().modify_qp(pair.a.qp(), &attr, IBV_QP_STATE), 0);
  EXPECT_EQ(poll(pair.a.send_cq(), kPieces - completed).size(), kPieces - completed);
  expect_pieces(kPieces, 5);
}

TEST_F(GpuPipeline, CompletionQueueOverrun_EndsInErrorAndNothingHangs) {
  const Cq small = create_cq(pair.device, 1);
  EndpointOptions options = gpu_endpoint();
  options.send_cq = small.get();
  Endpoint a(pair.device, options);
  Endpoint b(pair.device, gpu_endpoint());
  connect(a, b);
  const auto writes = static_cast<std::size_t>(small->cqe) + 8;
  for (std::size_t i = 0; i < writes; ++i) {
    const int posted = post(a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge(0, 64)}, pair.target.target(i));
    if (posted != 0) break;
  }
  expect_async_event(pair.device.context.get(), IBV_EVENT_CQ_ERR);
  const auto end = std::chrono::steady_clock::now() + kCompletionTimeout;
  while (a.state() != IBV_QPS_ERR && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  EXPECT_EQ(a.state(), IBV_QPS_ERR);
  a.destroy();
  b.destroy();
  pair.source.release();
  pair.target.release();
  EXPECT_TRUE(is_gpu_usable(0));
  EXPECT_TRUE(is_gpu_usable(1));
}

// What ends a QP while copies are under way.
enum class End {
  kResetOfSender,
  kResetOfReceiver,
  kErrorOfSender,
  kErrorOfReceiver,
  kDestroyedSender,
  kDestroyedReceiver
};

class GpuQpEnds : public testing::TestWithParam<End> {
 protected:
  void SetUp() override { VERBATIM_NEEDS_STANDIN(); }
};

std::string end_name(const testing::TestParamInfo<End>& tested) {
  constexpr const char* kEnds[] = {"ResetOfSender",   "ResetOfReceiver", "ErrorOfSender",
                                   "ErrorOfReceiver", "DestroyedSender", "DestroyedReceiver"};
  return kEnds[static_cast<std::size_t>(tested.param)];
}

INSTANTIATE_TEST_SUITE_P(By, GpuQpEnds,
                         testing::Values(End::kResetOfSender, End::kResetOfReceiver, End::kErrorOfSender,
                                         End::kErrorOfReceiver, End::kDestroyedSender, End::kDestroyedReceiver),
                         end_name);

// Memory of cuMemMap is unmapped without waiting for copies: one that is still under way would be an error of the GPU.
TEST_P(GpuQpEnds, CopiesUnderWay_TheMemoryCanBeFreedAtOnce) {
  const SlowCopies slow(kLateUs);
  for (unsigned round = 0; round < 4; ++round) {
    GpuPair pair(round % 2 == 0 ? kExportable0 : kPrivate0, kExportable1, kPieces * kPieceBytes,
                 gpu_endpoint({.timeout = 8, .retry_count = 1}));
    if (round >= 2) pair.warm_up();
    for (std::size_t i = 0; i < kPieces; ++i) {
      ASSERT_EQ(pair.post_write(i * kPieceBytes, kPieceBytes, i), 0);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
    switch (GetParam()) {
      case End::kResetOfSender:
        pair.a.to_reset();
        break;
      case End::kResetOfReceiver:
        pair.b.to_reset();
        break;
      case End::kErrorOfSender:
        pair.a.to_error();
        break;
      case End::kErrorOfReceiver:
        pair.b.to_error();
        break;
      case End::kDestroyedSender:
        pair.a.destroy();
        break;
      case End::kDestroyedReceiver:
        pair.b.destroy();
        break;
    }
    pair.target.release();
    if (round % 2 == 0) pair.source.release();
    if (GetParam() != End::kDestroyedSender && GetParam() != End::kResetOfSender) {
      const std::vector<ibv_wc> sent = poll(pair.a.send_cq(), kPieces);
      ASSERT_EQ(sent.size(), kPieces);
      EXPECT_TRUE(
          std::is_partitioned(sent.begin(), sent.end(), [](const ibv_wc& wc) { return wc.status == IBV_WC_SUCCESS; }));
    }
  }
  std::this_thread::sleep_for(5ms);
  EXPECT_TRUE(is_gpu_usable(0));
  EXPECT_TRUE(is_gpu_usable(1));
}

// When ibv_modify_qp returns, the memory belongs to the program again, also without deregistration.
TEST(GpuQpStates, ReceiverInErrorOrReset_NothingIsWrittenAnyMore) {
  VERBATIM_NEEDS_STANDIN();
  const GpuPair pair(kLegacy0, kExportable1, kPieces * kPieceBytes);
  pair.warm_up();
  const SlowCopies slow(kLateUs);
  for (unsigned round = 0; round < 6; ++round) {
    Endpoint a(pair.device, gpu_endpoint({.timeout = 8, .retry_count = 1}));
    Endpoint b(pair.device, gpu_endpoint());
    connect(a, b);
    for (std::size_t i = 0; i < kPieces; ++i) {
      ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge(i * kPieceBytes, kPieceBytes)},
                     pair.target.target(i, i * kPieceBytes)),
                0);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
    round % 2 == 0 ? b.to_error() : b.to_reset();
    pair.target.poison();
    std::this_thread::sleep_for(5ms);
    EXPECT_EQ(pair.target.untouched_outside(0, 0), "");
  }
}

}  // namespace
}  // namespace verbatim::test
