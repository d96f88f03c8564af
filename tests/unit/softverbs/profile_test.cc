//: in softverbs_devices_test
//: test softverbs-profiles-{engine} engine=thread,inline full-sanitized use=device SOFTVERBS_ENGINE={engine}
//:   + filter=Atomics.*:Dmabuf.*:Flush.*:GidTable.*:LateHostWrites.*:Profile.*:QpReuse.*:RetryEvent.*:RqPsn.*

// SOFTVERBS_PROFILE, and the settings with which the devices behave as those of a driver where it differs from the best
// case.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "qp_pair_fixture.h"
#include "support/child.h"
#include "support/verbs_peer.h"

namespace verbatim::test {
namespace {

// The bytes that a WRITE with `num_sge` 0 and a list sends.
std::size_t bytes_of_empty_write() {
  const Pair pair;
  pair.source.fill(1);
  ibv_sge segment = pair.source.sge(0, 48);
  ibv_send_wr work{};
  work.opcode = IBV_WR_RDMA_WRITE;
  work.sg_list = &segment;
  work.send_flags = IBV_SEND_SIGNALED;
  work.wr.rdma.remote_addr = pair.target.address();
  work.wr.rdma.rkey = pair.target.mr->rkey;
  ibv_send_wr* refused = nullptr;
  EXPECT_EQ(ibv_post_send(pair.a.qp(), &work, &refused), 0);
  EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
  return pair.target.buffer.untouched_outside(0, 0).empty() ? 0 : segment.length;
}

TEST(Profile, OfIrdma_IsOverriddenByASetting) {
  Variables irdma = {{"SOFTVERBS_PROFILE", "irdma"}, {"SOFTVERBS_LATE_HOST_MS", "0"}};
  check_in_child(irdma, [] { EXPECT_EQ(bytes_of_empty_write(), 48U); });
  irdma.emplace_back("SOFTVERBS_EMPTY_WRITE", "empty");
  check_in_child(irdma, [] { EXPECT_EQ(bytes_of_empty_write(), 0U); });
  check_in_child({{"SOFTVERBS_PROFILE", "standard"}}, [] { EXPECT_EQ(bytes_of_empty_write(), 0U); });
}

TEST(Profile, Unknown_IsRefused) {
  const std::string line = check_in_child({{"SOFTVERBS_PROFILE", "mlx4"}}, [] {
    int count = 1;
    EXPECT_EQ(verbs().get_device_list(&count), nullptr);
    EXPECT_EQ(errno, EINVAL);
    EXPECT_EQ(count, 0);
  });
  EXPECT_NE(line.find("SOFTVERBS_PROFILE=mlx4 is refused: the value must be one of standard, mlx5, bnxt_re, irdma"),
            std::string::npos)
      << line;
}

int to_init(const Endpoint& endpoint) {
  ibv_qp_attr attr = endpoint.init_attr();
  return verbs().modify_qp(endpoint.qp(), &attr, kInitMask);
}

TEST(QpReuse, Refused_QpThatWasResetStaysThere) {
  check_in_child({{"SOFTVERBS_QP_REUSE", "refused"}}, [] {
    Pair pair;
    pair.a.to_error();
    pair.a.to_reset();
    EXPECT_EQ(to_init(pair.a), EINVAL);
    EXPECT_EQ(pair.a.state(), IBV_QPS_RESET);
    Endpoint unconnected(pair.device);
    EXPECT_EQ(to_init(unconnected), 0);
    unconnected.to_reset();
    EXPECT_EQ(to_init(unconnected), EINVAL);
    pair.b.destroy();
    Endpoint new_one(pair.device);  // destroying the other one has reset it, too
    connect(new_one, new_one);
    EXPECT_EQ(new_one.state(), IBV_QPS_RTS);
  });
}

// 16.8 ms per attempt, two attempts.
constexpr Timers kTwoAttempts{.timeout = 12, .retry_count = 1};

ibv_wc_status write_to_peer(const Pair& pair) {
  EXPECT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge(0, 8)}, pair.to_target()), 0);
  return poll_one(pair.a.send_cq()).status;
}

std::uint32_t rq_psn(const Endpoint& endpoint) {
  ibv_qp_attr attributes{};
  ibv_qp_init_attr init{};
  EXPECT_EQ(verbs().query_qp(endpoint.qp(), &attributes, IBV_QP_RQ_PSN, &init), 0);
  return attributes.rq_psn;
}

// Three WRITEs of one packet arrive. rq_psn is queried after two of them, and in the error state.
void expect_rq_psn(const Variables& variables, std::uint32_t packets_in_rts,
                   std::optional<std::uint32_t> packets_in_err) {
  SCOPED_TRACE(testing::PrintToString(variables));
  check_in_child(variables, [&] {
    Pair pair;
    const std::uint32_t first = pair.a.address().psn;
    EXPECT_NE(first, 0U);
    EXPECT_EQ(write_to_peer(pair), IBV_WC_SUCCESS);
    EXPECT_EQ(write_to_peer(pair), IBV_WC_SUCCESS);
    EXPECT_EQ(rq_psn(pair.b), (first + packets_in_rts) & 0xffffff);
    EXPECT_EQ(write_to_peer(pair), IBV_WC_SUCCESS);
    pair.b.to_error();
    EXPECT_EQ(rq_psn(pair.b), packets_in_err ? (first + *packets_in_err) & 0xffffff : 0U);
  });
}

TEST(RqPsn, InTheErrorState_IsWhatTheSettingSays) {
  expect_rq_psn({{"SOFTVERBS_RQ_PSN", "exact"}}, 2, 3);
  expect_rq_psn({{"SOFTVERBS_RQ_PSN", "zero"}}, 2, std::nullopt);
  expect_rq_psn({{"SOFTVERBS_RQ_PSN", "cached"}}, 2, 2);
  expect_rq_psn({{"SOFTVERBS_RQ_PSN", "set"}}, 0, 0);
  expect_rq_psn({{"SOFTVERBS_RQ_PSN", "accepted"}}, 2, 3);
  expect_rq_psn({{"SOFTVERBS_PROFILE", "mlx5"}}, 2, 3);
  expect_rq_psn({{"SOFTVERBS_PROFILE", "bnxt_re"}}, 2, std::nullopt);
  expect_rq_psn({{"SOFTVERBS_PROFILE", "irdma"}}, 0, 0);
}

// An empty WRITE.
ibv_wc_status write_from(const Endpoint& endpoint) {
  EXPECT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {}), 0);
  return poll_one(endpoint.send_cq()).status;
}

TEST(RqPsn, Accepted_CountsARequestThatFoundThePortDown) {
  check_in_child({{"SOFTVERBS_RQ_PSN", "accepted"}, {"SOFTVERBS_FAULTS", "link-down device=1 after=1"}}, [] {
    const Device device = open_device(0);
    const Device failing = open_device(1);
    Endpoint sender(device, {.timers = kTwoAttempts});
    Endpoint target(failing);
    connect(sender, target);
    const std::uint32_t first = sender.address().psn;
    EXPECT_EQ(write_from(sender), IBV_WC_SUCCESS);
    EXPECT_EQ(write_from(sender), IBV_WC_RETRY_EXC_ERR);
    EXPECT_EQ(rq_psn(target), (first + 1) & 0xffffff);
    target.to_error();
    EXPECT_EQ(rq_psn(target), (first + 2) & 0xffffff);
    Address next = sender.address();
    next.psn = (first + 1) & 0xffffff;
    target.to_reset();
    target.to_init();
    target.to_rtr(next);
    target.to_error();
    EXPECT_EQ(rq_psn(target), next.psn);
  });
}

// The port of the sender, a process of its own, is down, or it cannot reach the target: nothing arrives.
TEST(RqPsn, Accepted_DoesNotCountWhatWasLostOnTheWay) {
  for (const char* faults : {"link-down after=1", "unreachable after=1"}) {
    SCOPED_TRACE(faults);
    check_in_child({{"SOFTVERBS_RQ_PSN", "accepted"}}, [&] {
      const Device device = open_device();
      Endpoint target(device);
      setenv("SOFTVERBS_FAULTS", faults, 1);
      Peer sender;
      target.connect(sender.address());
      sender.connect(target.address());
      ASSERT_EQ(sender.post(IBV_WR_RDMA_WRITE, 0, 0, {}), 0);
      EXPECT_EQ(sender.poll_sent().status, IBV_WC_SUCCESS);
      ASSERT_EQ(sender.post(IBV_WR_RDMA_WRITE, 0, 0, {}), 0);
      EXPECT_EQ(sender.poll_sent().status, IBV_WC_RETRY_EXC_ERR);
      target.to_error();
      EXPECT_EQ(rq_psn(target), (sender.address().psn + 1) & 0xffffff);
    });
  }
}

TEST(RqPsn, Accepted_CountsARequestThatFoundTheQpFailed) {
  check_in_child({{"SOFTVERBS_PROFILE", "mlx5"}}, [] {
    Pair pair(kTwoAttempts);
    pair.b.to_error();
    EXPECT_EQ(write_to_peer(pair), IBV_WC_RETRY_EXC_ERR);
    EXPECT_EQ(rq_psn(pair.b), (pair.a.address().psn + 1) & 0xffffff);
  });
}

// WRITEs whose retries are used up, at QPs with this event. It must be there when the program sees the completion
// (`is_first`), or the completion when the program sees the event. One moment later both are there in any case, so the
// program looks without pause, and more than once. With the inline engine one verb makes both, in either order.
void expect_retry_event(const Variables& variables, ibv_event_type type, bool is_first) {
  SCOPED_TRACE(testing::PrintToString(variables));
  check_in_child(variables, [&] {
    constexpr int kRounds = 30;
    constexpr Timers kShortAttempt{.timeout = 8, .retry_count = 0};  // 1 ms
    for (int round = 0; round < kRounds; ++round) {
      Pair pair(kShortAttempt);
      ibv_context* const context = pair.device.context.get();
      pair.b.to_error();
      ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {}), 0);
      ibv_wc completion{};
      Wait patience(kPatience);
      if (is_first) {
        while (ibv_poll_cq(pair.a.send_cq(), 1, &completion) == 0 && !patience.is_over())
          ;
        EXPECT_TRUE(readable(context->async_fd, 0ms));
      } else {
        // With the inline engine a poll does the work; this queue stays empty.
        while (!readable(context->async_fd, 0ms) && !patience.is_over())
          ASSERT_EQ(ibv_poll_cq(pair.b.send_cq(), 1, &completion), 0);
        ASSERT_EQ(ibv_poll_cq(pair.a.send_cq(), 1, &completion), 1);
      }
      EXPECT_EQ(completion.status, IBV_WC_RETRY_EXC_ERR);
      EXPECT_EQ(expect_async_event(context, type).qp, pair.a.qp());
    }
  });
}

TEST(RetryEvent, IsRaisedBeforeOrAfterTheCompletion) {
  expect_retry_event({{"SOFTVERBS_RETRY_EVENT", "fatal-before"}}, IBV_EVENT_QP_FATAL, true);
  expect_retry_event({{"SOFTVERBS_RETRY_EVENT", "fatal-after"}}, IBV_EVENT_QP_FATAL, false);
  expect_retry_event({{"SOFTVERBS_RETRY_EVENT", "access-before"}}, IBV_EVENT_QP_ACCESS_ERR, true);
  expect_retry_event({{"SOFTVERBS_RETRY_EVENT", "access-after"}}, IBV_EVENT_QP_ACCESS_ERR, false);
  expect_retry_event({{"SOFTVERBS_PROFILE", "bnxt_re"}}, IBV_EVENT_QP_ACCESS_ERR, true);
  expect_retry_event({{"SOFTVERBS_PROFILE", "irdma"}}, IBV_EVENT_QP_FATAL, false);
}

TEST(RetryEvent, None_NothingButTheCompletionIsSeen) {
  const Variables without[] = {{{"SOFTVERBS_PROFILE", "irdma"}, {"SOFTVERBS_RETRY_EVENT", "none"}},
                               {{"SOFTVERBS_PROFILE", "mlx5"}}};
  for (const Variables& variables : without) {
    SCOPED_TRACE(testing::PrintToString(variables));
    check_in_child(variables, [] {
      Pair pair(kTwoAttempts);
      pair.b.to_error();
      EXPECT_EQ(write_from(pair.a), IBV_WC_RETRY_EXC_ERR);
      EXPECT_FALSE(next_async_event(pair.device.context.get(), 5ms));
    });
  }
}

// A QP with two requests and a receive, of which the first request fails.
void expect_late_flush(const Variables& variables) {
  SCOPED_TRACE(testing::PrintToString(variables));
  check_in_child(variables, [&] {
    Pair pair(kTwoAttempts);
    ASSERT_EQ(post_recv(pair.a.qp(), {}, 3), 0);
    pair.b.to_error();
    const Stopwatch since_posted;
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge(0, 8)}, pair.to_target(1)), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge(0, 8)}, pair.to_target(2)), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_RETRY_EXC_ERR);
    EXPECT_EQ(pair.a.state(), IBV_QPS_ERR);
    ASSERT_EQ(post_recv(pair.a.qp(), {}, 4), 0);  // joins those that wait
    EXPECT_EQ(poll_one(pair.a.send_cq()).wr_id, 2U);
    for (const std::uint64_t wr_id : {3U, 4U}) {
      const ibv_wc flushed = poll_one(pair.a.recv_cq());
      EXPECT_EQ(flushed.wr_id, wr_id);
      EXPECT_EQ(flushed.status, IBV_WC_WR_FLUSH_ERR);
    }
    EXPECT_GE(since_posted.elapsed(), time_of_attempts(kTwoAttempts, 2) + 20ms);
    ASSERT_EQ(post_recv(pair.a.qp(), {}, 5), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge(0, 8)}, pair.to_target(6)), 0);
    EXPECT_EQ(poll_one(pair.a.recv_cq()).wr_id, 5U);
    EXPECT_EQ(poll_one(pair.a.send_cq()).wr_id, 6U);
  });
}

TEST(Flush, Late_ComesAfterTheCompletionThatFailed) {
  expect_late_flush({{"SOFTVERBS_FLUSH", "late"}});
  expect_late_flush({{"SOFTVERBS_PROFILE", "bnxt_re"}});
  expect_late_flush({{"SOFTVERBS_PROFILE", "irdma"}});
}

TEST(Flush, Late_AlsoWhenTheProgramSetsTheErrorState) {
  check_in_child({{"SOFTVERBS_FLUSH", "late"}}, [] {
    Pair pair;
    ASSERT_EQ(post_recv(pair.a.qp(), {}, 1), 0);
    const Stopwatch since_posted;
    pair.a.to_error();
    EXPECT_EQ(poll_one(pair.a.recv_cq()).status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_GE(since_posted.elapsed(), 20ms);
    // RESET ends what waits.
    pair.a.to_reset();
    pair.a.to_init();
    ASSERT_EQ(post_recv(pair.a.qp(), {}, 2), 0);
    pair.a.to_error();
    pair.a.to_reset();
    connect(pair.a, pair.a);
    ASSERT_EQ(post_recv(pair.a.qp(), {}, 3), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_SEND, {}), 0);
    const ibv_wc received = poll_one(pair.a.recv_cq());
    EXPECT_EQ(received.wr_id, 3U);
    EXPECT_EQ(received.status, IBV_WC_SUCCESS);
  });
}

// The receive that half a SEND has taken from a shared queue is flushed before IBV_EVENT_QP_LAST_WQE_REACHED says that
// nothing follows.
TEST(Flush, Late_LastWqeIsReportedAfterTheOpenReceive) {
  constexpr std::size_t kStep = 1 << 20;  // a longer message is sent in several steps
  check_in_child({{"SOFTVERBS_FLUSH", "late"}}, [] {
    const Device device = open_device();
    const Srq srq = create_srq(device.pd.get());
    const Region source(device.pd.get(), kStep);
    const Region target(device.pd.get(), 2 * kStep);
    Endpoint sender(device);
    Endpoint receiver(device, {.srq = srq.get()});
    connect(sender, receiver);
    ASSERT_EQ(post_srq_recv(srq.get(), {target.sge()}, 1), 0);
    ibv_sge without_key = source.sge();
    without_key.lkey = 0;
    ASSERT_EQ(post(sender.qp(), IBV_WR_SEND, {source.sge(), without_key}), 0);
    EXPECT_EQ(poll_one(sender.send_cq()).status, IBV_WC_LOC_PROT_ERR);
    receiver.to_error();
    ibv_wc completion{};
    // With the inline engine a poll does the work; this queue stays empty.
    for (Wait patience(kPatience); !readable(device.context->async_fd, 1ms) && !patience.is_over();) {
      ASSERT_EQ(ibv_poll_cq(sender.send_cq(), 1, &completion), 0);
    }
    EXPECT_EQ(expect_async_event(device.context.get(), IBV_EVENT_QP_LAST_WQE_REACHED).qp, receiver.qp());
    ASSERT_EQ(ibv_poll_cq(receiver.recv_cq(), 1, &completion), 1);
    EXPECT_EQ(completion.wr_id, 1U);
    EXPECT_EQ(completion.status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_FALSE(next_async_event(device.context.get(), 5ms));
  });
}

// Adds 1 by this process through device 0, and by another process through `other_device`, `count` times each, to a word
// of this process. Returns the word.
std::uint64_t sum_of_additions(std::uint32_t other_device, std::uint64_t count) {
  constexpr int kAtomicAccess = kAllAccess | IBV_ACCESS_REMOTE_ATOMIC;
  const Device own = open_device(0);
  const Device other = open_device(other_device);
  const Region word(own.pd.get(), 8, 0, kAtomicAccess);
  const Region result(own.pd.get(), 8);
  const Mr word_of_other = reg_mr(other.pd.get(), word.buffer.data(), 8, kAtomicAccess);
  std::memset(word.buffer.data(), 0, 8);
  Endpoint loop(own, {.access = kAtomicAccess});
  Endpoint to_adder(other, {.access = kAtomicAccess});
  connect(loop, loop);
  Peer adder({.device = other_device});
  to_adder.connect(adder.address());
  adder.connect(to_adder.address());
  adder.start_adding(count, {.remote_addr = word.address(), .rkey = word_of_other->rkey});
  for (std::uint64_t i = 0; i < count; ++i) {
    const SendOptions target{.remote_addr = word.address(), .rkey = word.mr->rkey};
    EXPECT_EQ(post_atomic(loop.qp(), IBV_WR_ATOMIC_FETCH_AND_ADD, result.sge(), target, 1), 0);
    EXPECT_EQ(poll_one(loop.send_cq()).status, IBV_WC_SUCCESS);
  }
  adder.await_added();
  std::uint64_t sum = 0;
  std::memcpy(&sum, word.buffer.data(), sizeof sum);
  return sum;
}

TEST(Atomics, OfOneDevice_ExcludeEachOtherOnly) {
  for (const Variables& variables :
       {Variables{{"SOFTVERBS_ATOMICS", "device"}}, Variables{{"SOFTVERBS_PROFILE", "mlx5"}},
        Variables{{"SOFTVERBS_PROFILE", "irdma"}}}) {
    SCOPED_TRACE(testing::PrintToString(variables));
    check_in_child(variables, [] {
      constexpr std::uint64_t kCount = 50;
      EXPECT_EQ(open_device().attr.atomic_cap, IBV_ATOMIC_HCA);
      EXPECT_EQ(sum_of_additions(0, kCount), 2 * kCount);
      // As long as both processes run at the same time, additions are lost.
      bool has_lost = false;
      for (Wait patience(kPatience); !has_lost && !patience.is_over();) {
        has_lost = sum_of_additions(1, kCount) < 2 * kCount;
      }
      EXPECT_TRUE(has_lost);
    });
  }
}

// The index of the GID 10.77.0.1 of RoCE v2; nullopt: none.
std::optional<std::uint32_t> index_of_address(const Device& device) {
  const std::uint8_t address[] = {10, 77, 0, 1};
  for (std::uint32_t index = 0; index < static_cast<std::uint32_t>(device.port.gid_tbl_len); ++index) {
    ibv_gid_entry entry{};
    if (verbs().query_gid_ex(device.context.get(), 1, index, &entry, 0, sizeof entry) != 0) continue;
    if (entry.gid_type == IBV_GID_TYPE_ROCE_V2 && std::memcmp(&entry.gid.raw[12], address, sizeof address) == 0)
      return index;
  }
  return std::nullopt;
}

// Connections of this device use the address of its interface, not the link-local one, which is never removed.
Device open_by_address(unsigned ordinal = 0) {
  Device device = open_device(ordinal);
  device.gid_index = 3;
  EXPECT_EQ(verbs().query_gid(device.context.get(), 1, device.gid_index, &device.gid), 0);
  return device;
}

// Polls while it waits, because the inline engine applies faults only during verbs.
void expect_events(const Endpoint& idle, const std::vector<ibv_event_type>& types) {
  ibv_context* const context = idle.device().context.get();
  for (const ibv_event_type type : types) {
    for (Wait patience(kPatience); !readable(context->async_fd, 1ms) && !patience.is_over();) {
      ibv_wc completion{};
      EXPECT_EQ(ibv_poll_cq(idle.send_cq(), 1, &completion), 0);
    }
    expect_async_event(context, type);
  }
}

std::optional<std::uint32_t> await_address(const Endpoint& idle) {
  std::optional<std::uint32_t> index;
  for (Wait patience(kPatience); !index && !patience.is_over(); index = index_of_address(idle.device())) {
    EXPECT_TRUE(stays_empty(idle.send_cq(), 1ms));
  }
  return index;
}

constexpr Timers kEndless{.timeout = 0};  // repeats what got no response

TEST(GidTable, Renumbered_AddressesReturnLateAtOtherIndices) {
  constexpr const char* kFlaps =
      "link-down device=0 after=1 for=10ms; link-down device=0 after=2 for=10ms; link-down device=0 after=3 for=10ms";
  check_in_child({{"SOFTVERBS_GID_TABLE", "renumbered"}, {"SOFTVERBS_FAULTS", kFlaps}}, [] {
    const Device device = open_by_address();
    EXPECT_EQ(index_of_address(device), 3U);
    Endpoint a(device, {.timers = kEndless});
    Endpoint b(device);
    connect(a, b);
    EXPECT_EQ(write_from(a), IBV_WC_SUCCESS);
    for (const std::uint32_t next : {5U, 7U, 3U}) {
      const Stopwatch since_down;
      EXPECT_EQ(write_from(a), IBV_WC_SUCCESS);  // the QP goes on, although its address is absent now
      expect_events(b, {IBV_EVENT_PORT_ERR, IBV_EVENT_GID_CHANGE, IBV_EVENT_GID_CHANGE, IBV_EVENT_PORT_ACTIVE,
                        IBV_EVENT_GID_CHANGE, IBV_EVENT_GID_CHANGE});
      EXPECT_GE(since_down.elapsed(), 210ms);
      EXPECT_EQ(index_of_address(device), next);
      Endpoint of_old_index(device);
      of_old_index.to_init();
      ibv_qp_attr attributes = of_old_index.rtr_attr(a.address());
      EXPECT_EQ(verbs().modify_qp(of_old_index.qp(), &attributes, kRtrMask), next == 3 ? 0 : EINVAL);
    }
  });
}

TEST(GidTable, Renumbered_NewPeerIsUnreachableUntilTheAddressReturns) {
  check_in_child({{"SOFTVERBS_GID_TABLE", "renumbered"}, {"SOFTVERBS_FAULTS", "link-down device=0 after=1 for=10ms"}},
                 [] {
                   const Device device = open_by_address(0);
                   const Device other = open_device(1);
                   Endpoint loop(other);
                   connect(loop, loop);
                   Endpoint target(device);
                   Endpoint sender(other, {.timers = kEndless});
                   connect(sender, target);
                   EXPECT_EQ(write_from(loop), IBV_WC_SUCCESS);
                   const Stopwatch since_down;
                   EXPECT_EQ(write_from(sender), IBV_WC_SUCCESS);
                   EXPECT_GE(since_down.elapsed(), 210ms);
                   EXPECT_EQ(index_of_address(device), 5U);
                 });
}

TEST(GidTable, Renumbered_AddressesAreAbsentWhileTheLinkIsDown) {
  check_in_child({{"SOFTVERBS_GID_TABLE", "renumbered"}, {"SOFTVERBS_FAULTS", "link-down device=0 after=1"}}, [] {
    Pair pair(kTwoAttempts);
    EXPECT_EQ(write_to_peer(pair), IBV_WC_SUCCESS);
    EXPECT_EQ(write_to_peer(pair), IBV_WC_RETRY_EXC_ERR);
    EXPECT_EQ(index_of_address(pair.device), std::nullopt);
    ibv_gid_entry of_device_itself{};
    EXPECT_EQ(verbs().query_gid_ex(pair.device.context.get(), 1, 1, &of_device_itself, 0, sizeof of_device_itself), 0);
  });
}

// Writes on another device begin the faults of device 0.
void write_on_loop(std::size_t count) {
  const Device other = open_device(1);
  Endpoint loop(other);
  connect(loop, loop);
  for (std::size_t i = 0; i < count; ++i) EXPECT_EQ(write_from(loop), IBV_WC_SUCCESS);
}

TEST(GidTable, Renumbered_LinkThatFailsAgainKeepsTheAddressesAway) {
  constexpr const char* kFlaps = "link-down device=0 after=1; link-up after=2; link-down device=0 after=3 for=150ms";
  check_in_child({{"SOFTVERBS_GID_TABLE", "renumbered"}, {"SOFTVERBS_FAULTS", kFlaps}}, [] {
    const Device device = open_device(0);
    const Endpoint idle(device);
    const Stopwatch since_down;
    write_on_loop(4);
    expect_events(idle, {IBV_EVENT_PORT_ERR, IBV_EVENT_GID_CHANGE, IBV_EVENT_GID_CHANGE, IBV_EVENT_PORT_ACTIVE,
                         IBV_EVENT_PORT_ERR, IBV_EVENT_PORT_ACTIVE});
    EXPECT_EQ(await_address(idle), 5U);
    EXPECT_GE(since_down.elapsed(), 350ms);
  });
}

TEST(GidTable, Renumbered_ClearReturnsAddressesToTheirEntries) {
  check_in_child({{"SOFTVERBS_GID_TABLE", "renumbered"}, {"SOFTVERBS_FAULTS", "link-down device=0; clear"}},
                 [] { EXPECT_EQ(index_of_address(open_device()), 3U); });
}

TEST(GidTable, Renumbered_AddressesThatFindNoEntryReturnWithTheNextLink) {
  std::string faults = "link-down; ";
  for (const char* index : {"2", "3", "4", "5", "6", "7"})
    faults += std::string("gid device=0 address=10.0.0.9 type=rocev2 index=") + index + "; ";
  faults += "link-up; link-down device=0 after=1 for=10ms";
  check_in_child({{"SOFTVERBS_GID_TABLE", "renumbered"}, {"SOFTVERBS_FAULTS", faults}}, [] {
    const Device device = open_device(0);
    const Device other = open_device(1);
    const Endpoint idle(other);
    expect_events(idle, {IBV_EVENT_GID_CHANGE, IBV_EVENT_GID_CHANGE});  // then it is too late for those of device 0
    EXPECT_EQ(index_of_address(device), std::nullopt);
    write_on_loop(2);
    EXPECT_EQ(await_address(Endpoint(device)), 3U);
  });
}

TEST(GidTable, Renumbered_InfinibandKeepsItsGids) {
  check_in_child({{"SOFTVERBS_GID_TABLE", "renumbered"},
                  {"SOFTVERBS_LINK_LAYER", "ib"},
                  {"SOFTVERBS_FAULTS", "gid device=1 index=2 address=fe80::9 type=ib; link-down device=1"}},
                 [] {
                   int count = 0;
                   ibv_device** const list = verbs().get_device_list(&count);
                   ASSERT_EQ(count, 2);
                   const Context context(verbs().open_device(list[1]));
                   verbs().free_device_list(list);
                   ibv_gid_entry entry{};
                   EXPECT_EQ(verbs().query_gid_ex(context.get(), 1, 2, &entry, 0, sizeof entry), 0);
                 });
}

// What drivers and kernels without dma-bufs return, and those that cannot map one.
TEST(Dmabuf, Refused_HasTheErrnoOfTheClause) {
  const std::pair<const char*, int> errors[] = {
      {"EOPNOTSUPP", EOPNOTSUPP}, {"EPROTONOSUPPORT", EPROTONOSUPPORT}, {"EINVAL", EINVAL}, {"ENOMEM", ENOMEM}};
  for (const auto& [name, error] : errors) {
    const std::string clause = std::string("fail verb=reg_dmabuf_mr nth=2 count=all errno=") + name;
    check_in_child({{"SOFTVERBS_DMABUF", "1"}, {"SOFTVERBS_FAULTS", clause}}, [&, expected = error] {
      const Device device = open_device();
      const UniqueFd file(memfd_create("dmabuf", MFD_CLOEXEC));
      ASSERT_EQ(ftruncate(file.get(), 4096), 0);
      const auto registered = [&] {
        errno = 0;
        return Mr(verbs().reg_dmabuf_mr(device.pd.get(), 0, 4096, 0, file.get(), kAllAccess));
      };
      EXPECT_NE(registered(), nullptr);
      EXPECT_EQ(registered(), nullptr);
      EXPECT_EQ(errno, expected);
    });
  }
}

}  // namespace
}  // namespace verbatim::test
