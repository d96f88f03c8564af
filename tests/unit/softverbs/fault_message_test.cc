//: in softverbs_fault_test

// Faults of messages: lost, delayed and refused messages and responses, and completions that fail or are missing. No
// message is executed twice.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "qp_pair_fixture.h"
#include "support/child.h"
#include "support/verbs_peer.h"

namespace verbatim::test {
namespace {

// 16.8 ms per attempt, eight attempts.
constexpr Timers kTimers{.timeout = 12, .retry_count = 7};
// The same with two attempts.
constexpr Timers kOneRetry{.timeout = 12, .retry_count = 1};

constexpr ibv_wr_opcode kKinds[] = {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
                                    IBV_WR_RDMA_READ};

bool consumes_receive(ibv_wr_opcode kind) {
  return kind != IBV_WR_RDMA_WRITE && kind != IBV_WR_RDMA_READ;
}

int post_atomic(Pair& pair, ibv_wr_opcode kind, std::uint64_t compare_add, std::uint64_t swap) {
  ibv_sge sge = pair.source.sge(0, 8);
  ibv_send_wr request{};
  request.sg_list = &sge;
  request.num_sge = 1;
  request.opcode = kind;
  request.send_flags = IBV_SEND_SIGNALED;
  request.wr.atomic = {pair.target.address(), compare_add, swap, pair.target.mr->rkey};
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(pair.a.qp(), &request, &bad);
}

std::uint64_t word_of(const Region& region) {
  std::uint64_t word = 0;
  std::memcpy(&word, region.buffer.data(), sizeof(word));
  return word;
}

void set_word(const Region& region, std::uint64_t word) {
  std::memcpy(region.buffer.data(), &word, sizeof(word));
}

// The QP number of the first QP of a registry; the process is the only one in its group.
std::string first_qp_number(const std::string& group, const std::string& seed) {
  const std::string name = "qpn-" + std::to_string(getpid()) + group;
  return check_in_child({{"SOFTVERBS_NAMESPACE", name}, {"SOFTVERBS_SEED", seed}}, [] {
    const Device device = open_device();
    std::fprintf(stderr, "%u", Endpoint(device).qp()->qp_num);
  });
}

// `qpn=` in a clause means the same QP when a run is repeated.
TEST(QpNumbers, NextRun_BeginsEqually_OtherGroupOrSeedDoesNot) {
  const std::string first = first_qp_number("a", "1");
  EXPECT_EQ(first_qp_number("a", "1"), first);
  EXPECT_NE(first_qp_number("b", "1"), first);
  EXPECT_NE(first_qp_number("a", "2"), first);
}

TEST(DropAck, Retry_IsAcknowledged_AndNotExecutedAgain) {
  with_faults("drop-ack count=all times=2", [] {
    for (const ibv_wr_opcode kind : kKinds) {
      SCOPED_TRACE(kind);
      Pair pair(kTimers);
      pair.source.fill(1);
      pair.target.fill(2);
      for (const std::uint64_t wr_id : {1U, 2U}) ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge()}, wr_id), 0);
      const Stopwatch stopwatch;
      ASSERT_EQ(post(pair.a.qp(), kind, {pair.source.sge()}, pair.to_target(5)), 0);
      const ibv_wc sent = poll_one(pair.a.send_cq());
      EXPECT_EQ(sent.wr_id, 5U);
      EXPECT_EQ(sent.status, IBV_WC_SUCCESS);
      EXPECT_GE(stopwatch.elapsed(), time_of_attempts(kTimers, 2));
      if (consumes_receive(kind)) {
        EXPECT_EQ(poll_one(pair.b.recv_cq()).wr_id, 1U);
      }
      EXPECT_TRUE(stays_empty(pair.b.recv_cq()));
      EXPECT_EQ(pair.b.state(), IBV_QPS_RTS);
      const std::uint64_t seed = kind == IBV_WR_RDMA_READ ? 2 : 1;
      EXPECT_EQ(find_wrong_byte(pair.source.buffer.bytes(), seed), std::nullopt);
      EXPECT_EQ(find_wrong_byte(pair.target.buffer.bytes(), seed), std::nullopt);
    }
  });
}

// The receiver changes the memory before the retry arrives.
TEST(DropAck, RetryOfWriteWithImm_DoesNotWriteAgain) {
  with_faults("drop-ack op=write_imm", [] {
    Pair pair(kTimers);
    pair.source.fill(1);
    ASSERT_EQ(post_recv(pair.b.qp(), {}, 1), 0);
    const Stopwatch stopwatch;
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, {pair.source.sge()}, pair.to_target()), 0);
    EXPECT_EQ(poll_one(pair.b.recv_cq()).opcode, IBV_WC_RECV_RDMA_WITH_IMM);
    pair.target.fill(9);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_GE(stopwatch.elapsed(), time_of_attempts(kTimers, 1));
    EXPECT_EQ(find_wrong_byte(pair.target.buffer.bytes(), 9), std::nullopt);
  });
}

// The same without a completion at the receiver. With adaptive routing the payload may be placed later.
TEST(DropAck, RetryOfPlainWrite_DoesNotWriteAgain) {
  with_faults("drop-ack op=write", [] {
    Pair pair(kTimers);
    pair.source.fill(1);
    const Stopwatch stopwatch;
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge()}, pair.to_target()), 0);
    while (find_wrong_byte(pair.target.buffer.bytes(), 1)) ASSERT_LT(stopwatch.elapsed(), kCompletionTimeout);
    pair.target.fill(9);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_GE(stopwatch.elapsed(), time_of_attempts(kTimers, 1));
    EXPECT_EQ(find_wrong_byte(pair.target.buffer.bytes(), 9), std::nullopt);
  });
}

TEST(DropAck, RetriedAtomic_ReturnsTheFirstResult) {
  with_faults("drop-ack op=fetch_add,cmp_swap count=all times=3", [] {
    Pair pair(kTimers);
    set_word(pair.target, 40);
    const Stopwatch stopwatch;
    ASSERT_EQ(post_atomic(pair, IBV_WR_ATOMIC_FETCH_AND_ADD, 2, 0), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_GE(stopwatch.elapsed(), time_of_attempts(kTimers, 3));
    EXPECT_EQ(word_of(pair.source), 40U);
    EXPECT_EQ(word_of(pair.target), 42U);
    ASSERT_EQ(post_atomic(pair, IBV_WR_ATOMIC_CMP_AND_SWP, 42, 7), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(word_of(pair.source), 42U);  // a second execution would have found 7
    EXPECT_EQ(word_of(pair.target), 7U);
  });
}

TEST(DropAck, MessageOfManySteps_Completes) {
  constexpr std::size_t kBytes = (3U << 20) + 5;
  with_faults("drop-ack qp=each", [] {
    for (const ibv_wr_opcode kind : {IBV_WR_SEND, IBV_WR_RDMA_WRITE}) {
      Pair pair(kTimers, kBytes);
      pair.source.fill(3);
      ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge()}), 0);
      const Stopwatch stopwatch;
      ASSERT_EQ(post(pair.a.qp(), kind, {pair.source.sge()}, pair.to_target()), 0);
      EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
      EXPECT_GE(stopwatch.elapsed(), time_of_attempts(kTimers, 1));
      EXPECT_EQ(find_wrong_byte(pair.target.buffer.bytes(), 3), std::nullopt);
      ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge()}, pair.to_target()), 0);
      EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);  // both ends still expect the same PSN
    }
  });
}

TEST(DropAck, EveryAttempt_EndsInRetryExceeded) {
  with_faults("drop-ack times=all", [] {
    Pair pair(kOneRetry);
    ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge()}, 1), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_SEND, {pair.source.sge()}), 0);
    EXPECT_EQ(poll_one(pair.b.recv_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_RETRY_EXC_ERR);
    EXPECT_EQ(pair.a.state(), IBV_QPS_ERR);
    EXPECT_EQ(pair.b.state(), IBV_QPS_RTS);
  });
}

// The receiver has its data and destroys its QP before the retry arrives, so the sender gets no success.
TEST(DropAck, ReceiverDestroyedBeforeRetry_EndsInRetryExceeded) {
  with_faults("drop-ack op=write_imm last", [] {
    Pair pair({.timeout = 19, .retry_count = 1});  // 2.1 s until the retry is sent
    ASSERT_EQ(post_recv(pair.b.qp(), {}, 1), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, {pair.source.sge()}, pair.to_target()), 0);
    EXPECT_EQ(poll_one(pair.b.recv_cq()).status, IBV_WC_SUCCESS);
    pair.b.destroy();
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_RETRY_EXC_ERR);
  });
}

TEST(DropAck, BetweenProcesses_MessageArrivesOnce) {
  with_faults("drop-ack op=write_imm", [] {
    const Device device = open_device();
    const Region region(device.pd.get(), 4096, 7);
    Endpoint endpoint(device, {.timers = kTimers});
    unsetenv("SOFTVERBS_FAULTS");
    Peer peer;
    endpoint.connect(peer.address());
    peer.connect(endpoint.address());
    region.fill(4);
    for (const std::uint64_t wr_id : {1U, 2U}) ASSERT_EQ(peer.post_recv(0, 0, wr_id), 0);
    const Stopwatch stopwatch;
    ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, {region.sge()}, peer.target(1)), 0);
    EXPECT_EQ(peer.poll_received().wr_id, 1U);  // the peer has the message before the sender gets its completion
    EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_GE(stopwatch.elapsed(), time_of_attempts(kTimers, 1));
    ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, {region.sge()}, peer.target(2)), 0);
    EXPECT_EQ(peer.poll_received().wr_id, 2U);  // the first message arrived only once
    EXPECT_EQ(poll_one(endpoint.send_cq()).wr_id, 2U);
    EXPECT_EQ(peer.find_wrong_byte(0, 4096, 4), std::nullopt);
  });
}

// Posts one message of each kind, and behind them a READ, which no clause of these tests selects: completions come in
// order, so those that are missing when it has come do not come. 'x' for each missing one, '.' for the others.
std::string without_completion(Pair& pair, std::initializer_list<ibv_wr_opcode> kinds) {
  std::string result(kinds.size(), 'x');
  std::uint64_t wr_id = 0;
  for (const ibv_wr_opcode kind : kinds) {
    EXPECT_EQ(post_recv(pair.b.qp(), {}), 0);
    EXPECT_EQ(post(pair.a.qp(), kind, {}, pair.to_target(wr_id++)), 0);
  }
  EXPECT_EQ(post(pair.a.qp(), IBV_WR_RDMA_READ, {pair.source.sge()}, pair.to_target(wr_id)), 0);
  while (!::testing::Test::HasFailure()) {
    const ibv_wc completion = poll_one(pair.a.send_cq());
    EXPECT_EQ(completion.status, IBV_WC_SUCCESS);
    if (completion.wr_id >= kinds.size()) break;
    result[completion.wr_id] = '.';
  }
  return result;
}

// Clauses about messages select them in the same way, whatever their effect is.
TEST(FaultSelection, NthAndCount_SelectByOpcode) {
  with_faults("drop-completion op=write,send nth=2 count=2", [] {
    Pair pair;
    EXPECT_EQ(without_completion(pair, {IBV_WR_RDMA_WRITE, IBV_WR_SEND_WITH_IMM, IBV_WR_SEND,
                                        IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_WRITE, IBV_WR_SEND}),
              "..x.x.");
  });
}

TEST(FaultSelection, QpByOrdinal_IsSelected) {
  const auto body = [] {
    Pair first;
    Pair second;
    EXPECT_EQ(without_completion(first, {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE}), "..");
    EXPECT_EQ(without_completion(second, {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE}), ".x");
  };
  with_faults("drop-completion op=write qp=3 nth=2", body);
  with_faults("drop-completion op=write nth=4", body);
}

TEST(FaultSelection, EachQp_IsCountedSeparately) {
  with_faults("drop-completion op=write qp=each nth=2", [] {
    Pair first;
    Pair second;
    EXPECT_EQ(without_completion(first, {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE}), ".x.");
    EXPECT_EQ(without_completion(second, {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE}), ".x");
  });
}

TEST(DropRequest, LostRequest_ArrivesAfterTheTimeout) {
  with_faults("drop-request op=send times=2", [] {
    Pair pair(kTimers);
    ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge()}), 0);
    const Stopwatch stopwatch;
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_SEND, {pair.source.sge()}), 0);
    EXPECT_EQ(poll_one(pair.b.recv_cq()).status, IBV_WC_SUCCESS);
    EXPECT_GE(stopwatch.elapsed(), time_of_attempts(kTimers, 2));
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
  });
}

TEST(Loss, SameSeed_LosesTheSameMessages) {
  // For each of six QPs: the number of messages that complete before the first lost one.
  const auto lost_after = [](const std::string& faults) {
    return with_faults(faults, [] {
      for (int qp = 0; qp < 6; ++qp) {
        Pair pair({.timeout = 8, .retry_count = 0});
        int sent = 0;
        while (sent < 1000 && post(pair.a.qp(), IBV_WR_RDMA_WRITE, {}, pair.to_target()) == 0 &&
               poll_one(pair.a.send_cq()).status == IBV_WC_SUCCESS) {
          ++sent;
        }
        std::fprintf(stderr, "%d ", sent);
      }
    });
  };
  const std::string first = lost_after("loss rate=0.05; seed=1");
  EXPECT_EQ(lost_after("loss rate=0.05; seed=1"), first);
  EXPECT_NE(lost_after("loss rate=0.05; seed=2"), first);
  EXPECT_NE(first.find_first_not_of("0 "), std::string::npos) << first;
  EXPECT_EQ(first.find("1000"), std::string::npos) << first;
}

TEST(Loss, EnoughRetries_DeliverEveryMessageOnce) {
  with_faults("loss rate=0.2", [] {
    constexpr std::uint64_t kMessages = 60;
    Pair pair({.timeout = 8, .retry_count = 7, .min_rnr_timer = 1});
    std::uint64_t retried = 0;
    for (std::uint64_t i = 0; i < kMessages; ++i) {
      ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge()}, i), 0);
      const Stopwatch stopwatch;
      ASSERT_EQ(post(pair.a.qp(), IBV_WR_SEND, {pair.source.sge()}, {.wr_id = i}), 0);
      EXPECT_EQ(poll_one(pair.a.send_cq()).wr_id, i);
      if (stopwatch.elapsed() >= time_of_attempts({.timeout = 8}, 1)) ++retried;
      EXPECT_EQ(poll_one(pair.b.recv_cq()).wr_id, i);
    }
    EXPECT_TRUE(stays_empty(pair.b.recv_cq()));
    EXPECT_GT(retried, 5U);  // of about 22
  });
}

TEST(Delay, Message_ArrivesLater) {
  with_faults("delay by=30ms op=send", [] {
    Pair pair({.timeout = 14, .retry_count = 0});
    ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge()}), 0);
    const Stopwatch stopwatch;
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_SEND, {pair.source.sge()}), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_GE(stopwatch.elapsed(), 30ms);
    EXPECT_EQ(poll_one(pair.b.recv_cq()).status, IBV_WC_SUCCESS);
  });
}

// On one QP the delay of each message begins when the previous message was sent.
TEST(Delay, MessagesOfOneQp_AreDelayedInSequence) {
  with_faults("delay by=30ms", [] {
    Pair pair({.timeout = 14, .retry_count = 0});
    const Stopwatch stopwatch;
    for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {}, pair.to_target(i)), 0);
    for (std::uint64_t i = 0; i < 3; ++i) {
      const ibv_wc wc = poll_one(pair.a.send_cq());
      EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
      EXPECT_EQ(wc.wr_id, i);
    }
    EXPECT_GE(stopwatch.elapsed(), 3 * 30ms);
  });
}

TEST(Delay, LongerThanAllRetries_EndsInRetryExceeded) {
  with_faults("delay by=10s", [] {
    Pair pair(kOneRetry);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {}, pair.to_target()), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_RETRY_EXC_ERR);
  });
}

// The delay is longer than one attempt and shorter than all of them: some attempts time out, then the response arrives.
TEST(Delay, LongerThanOneAttempt_Completes) {
  with_faults("delay by=40ms jitter=10ms", [] {
    Pair pair(kTimers);
    const Stopwatch stopwatch;
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {}, pair.to_target()), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_GE(stopwatch.elapsed(), 40ms);
  });
}

// 40.96 ms per RNR NAK.
constexpr std::uint8_t kLongRnrTimer = 24;

TEST(Rnr, ConfiguredRefusals_DelayTheMessage) {
  with_faults("rnr op=send,write_imm times=3 count=2", [] {
    for (const ibv_wr_opcode kind : {IBV_WR_SEND, IBV_WR_RDMA_WRITE_WITH_IMM}) {
      Pair pair({.rnr_retry = 3, .min_rnr_timer = kLongRnrTimer});
      ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge()}), 0);
      const Stopwatch stopwatch;
      ASSERT_EQ(post(pair.a.qp(), kind, {pair.source.sge()}, pair.to_target()), 0);
      EXPECT_EQ(poll_one(pair.b.recv_cq()).status, IBV_WC_SUCCESS);
      EXPECT_GE(stopwatch.elapsed(), 3 * 40ms);
      EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    }
  });
}

TEST(Rnr, EndlessRefusals_EndInRnrRetryExceeded) {
  with_faults("rnr count=all times=all", [] {
    Pair pair({.rnr_retry = 2, .min_rnr_timer = 1});
    ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge()}), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge()}, pair.to_target()), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);  // a WRITE consumes no receive
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_SEND, {pair.source.sge()}), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_RNR_RETRY_EXC_ERR);
    EXPECT_EQ(pair.b.state(), IBV_QPS_RTS);
  });
}

TEST(Complete, NthRequest_Fails_AndTheRestIsFlushed) {
  with_faults("complete nth=2 status=REM_ACCESS_ERR vendor=0x51", [] {
    Pair pair(kTimers);
    pair.source.fill(1);
    for (const std::uint64_t wr_id : {1U, 2U, 3U}) {
      ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge(0, 8)}, pair.to_target(wr_id, 8 * wr_id)), 0);
    }
    const std::vector<ibv_wc> sent = poll(pair.a.send_cq(), 3);
    ASSERT_EQ(sent.size(), 3U);
    EXPECT_EQ(sent[0].status, IBV_WC_SUCCESS);
    EXPECT_EQ(sent[1].wr_id, 2U);
    EXPECT_EQ(sent[1].status, IBV_WC_REM_ACCESS_ERR);
    EXPECT_EQ(sent[1].vendor_err, 0x51U);
    EXPECT_EQ(sent[1].qp_num, pair.a.qp()->qp_num);
    EXPECT_EQ(sent[2].wr_id, 3U);
    EXPECT_EQ(sent[2].status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_EQ(sent[2].vendor_err, 0U);
    // Fields that the standard leaves undefined hold no plausible values, so that a program cannot rely on them.
    for (const ibv_wc& wc : {sent[1], sent[2]}) {
      EXPECT_NE(wc.opcode, IBV_WC_RDMA_WRITE);
      EXPECT_NE(wc.byte_len, 8U);
      EXPECT_NE(wc.src_qp, 0U);
    }
    EXPECT_EQ(pair.a.state(), IBV_QPS_ERR);
    EXPECT_EQ(pair.b.state(), IBV_QPS_RTS);
    EXPECT_EQ(pair.target.buffer.untouched_outside(8, 8), "");  // the second and third were not sent
  });
}

TEST(Complete, FailedWrite_DoesNotChangeMemory) {
  with_faults("complete op=write_imm qp=each status=REM_ACCESS_ERR", [] {
    for (unsigned round = 0; round < 20; ++round) {
      Pair pair(kTimers);
      pair.source.fill(1);
      pair.target.fill(2);
      SendOptions ahead = pair.to_target();
      ahead.flags = 0;
      ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge(0, 64)}, ahead), 0);
      ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, {pair.source.sge(64, 4032)}, pair.to_target(1, 64)), 0);
      EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_REM_ACCESS_ERR);
      EXPECT_EQ(find_wrong_byte(pair.target.bytes(64, 4032), 2, 64), std::nullopt);
    }
  });
}

TEST(Complete, AnyErrorStatus_IsReported) {
  const std::pair<const char*, ibv_wc_status> statuses[] = {
      {"LOC_LEN_ERR", IBV_WC_LOC_LEN_ERR},     {"LOC_QP_OP_ERR", IBV_WC_LOC_QP_OP_ERR},
      {"REM_OP_ERR", IBV_WC_REM_OP_ERR},       {"GENERAL_ERR", IBV_WC_GENERAL_ERR},
      {"FATAL_ERR", IBV_WC_FATAL_ERR},         {"BAD_RESP_ERR", IBV_WC_BAD_RESP_ERR},
      {"RETRY_EXC_ERR", IBV_WC_RETRY_EXC_ERR},
  };
  for (const auto& entry : statuses) {
    const ibv_wc_status status = entry.second;
    with_faults(std::string("complete status=") + entry.first, [status] {
      Pair pair(kTimers);
      ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {}, pair.to_target()), 0);
      EXPECT_EQ(poll_one(pair.a.send_cq()).status, status);
    });
  }
}

TEST(Complete, NthReceive_Fails_AndSenderFails) {
  for (const ibv_wr_opcode kind : {IBV_WR_SEND, IBV_WR_RDMA_WRITE_WITH_IMM}) {
    with_faults("complete op=recv nth=2 status=LOC_LEN_ERR", [kind] {
      Pair pair(kTimers);
      for (const std::uint64_t wr_id : {1U, 2U, 3U}) ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge()}, wr_id), 0);
      for (int i = 0; i < 2; ++i) ASSERT_EQ(post(pair.a.qp(), kind, {pair.source.sge()}, pair.to_target()), 0);
      EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
      EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_REM_INV_REQ_ERR);
      const std::vector<ibv_wc> received = poll(pair.b.recv_cq(), 3);
      ASSERT_EQ(received.size(), 3U);
      EXPECT_EQ(received[0].status, IBV_WC_SUCCESS);
      EXPECT_EQ(received[1].status, IBV_WC_LOC_LEN_ERR);
      EXPECT_EQ(received[1].wr_id, 2U);
      EXPECT_EQ(received[2].status, IBV_WC_WR_FLUSH_ERR);
      EXPECT_EQ(pair.b.state(), IBV_QPS_ERR);
    });
  }
}

// The completion is missing, but its queue entry is free again, and later receives complete.
TEST(DropCompletion, Receive_DataArrives_CompletionDoesNot) {
  for (const ibv_wr_opcode kind : {IBV_WR_SEND, IBV_WR_RDMA_WRITE_WITH_IMM}) {
    with_faults("drop-completion op=recv nth=2", [kind] {
      Pair pair(kTimers);
      pair.source.fill(1);
      for (const std::uint64_t wr_id : {1U, 2U, 3U}) ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge()}, wr_id), 0);
      for (int i = 0; i < 3; ++i) {
        pair.target.fill(2);
        ASSERT_EQ(post(pair.a.qp(), kind, {pair.source.sge()}, pair.to_target()), 0);
        EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
        EXPECT_EQ(find_wrong_byte(pair.target.bytes(0, 4096), 1, 0), std::nullopt) << "the data must arrive";
      }
      const std::vector<ibv_wc> received = poll(pair.b.recv_cq(), 2);
      ASSERT_EQ(received.size(), 2U);
      EXPECT_EQ(received[0].wr_id, 1U);
      EXPECT_EQ(received[1].wr_id, 3U);
      EXPECT_EQ(received[1].status, IBV_WC_SUCCESS);
      EXPECT_TRUE(stays_empty(pair.b.recv_cq()));
    });
  }
}

TEST(DropCompletion, Send_CompletionIsMissing) {
  for (const ibv_wr_opcode kind : kKinds) {
    SCOPED_TRACE(kind);
    with_faults("drop-completion nth=1 count=2", [kind] {
      Pair pair(kTimers);
      for (const std::uint64_t wr_id : {1U, 2U, 3U}) ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge()}, wr_id), 0);
      for (const std::uint64_t wr_id : {1U, 2U, 3U}) {
        ASSERT_EQ(post(pair.a.qp(), kind, {pair.source.sge()}, pair.to_target(wr_id)), 0);
      }
      const ibv_wc sent = poll_one(pair.a.send_cq());
      EXPECT_EQ(sent.wr_id, 3U);
      EXPECT_EQ(sent.status, IBV_WC_SUCCESS);
      EXPECT_TRUE(stays_empty(pair.a.send_cq()));
    });
  }
}

TEST(DropCompletion, ErrorCompletion_IsStillReported) {
  with_faults("drop-completion; complete nth=1 status=REM_OP_ERR", [] {
    Pair pair(kTimers);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge()}, pair.to_target(1)), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_REM_OP_ERR);
  });
}

}  // namespace
}  // namespace verbatim::test
