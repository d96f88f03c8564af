//: in softverbs_devices_test

// SOFTVERBS_LATE_HOST_MS: what a device has written to host memory is not visible at once, and what makes it visible.
// Where a test says that nothing is visible yet, the time is an hour. GPU memory: gpu_late_test.cc.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <utility>
#include <vector>

#include "qp_pair_fixture.h"
#include "support/child.h"
#include "support/verbs_peer.h"

namespace verbatim::test {
namespace {

const Variables kLateUntilShown = {{"SOFTVERBS_LATE_HOST_MS", "3600000"}};

// A region of this process that a QP pair of device 0 writes, and that both devices read and write over QPs which are
// connected to themselves.
struct LateTarget {
  explicit LateTarget(std::size_t bytes = 1000)
      : pair(Timers{}, bytes),
        into(pair.device.pd.get(), bytes),
        into_other(other.pd.get(), bytes),
        of_other(reg_mr(other.pd.get(), pair.target.buffer.data(), bytes)),
        loop(pair.device),
        other_loop(other) {
    connect(loop, loop);
    connect(other_loop, other_loop);
    pair.source.fill(1);
  }

  // A WRITE of the whole source. When it returns, the sender has the completion.
  void write() const {
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge()}, pair.to_target()), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
  }
  bool is_untouched() const { return pair.target.buffer.untouched_outside(0, 0).empty(); }
  bool has_arrived() const { return !find_wrong_byte(pair.target.buffer.bytes(), 1); }

  // READs the target. True: it has read what was written.
  static bool reads(const Endpoint& endpoint, const Region& into, const SendOptions& target) {
    EXPECT_EQ(post(endpoint.qp(), IBV_WR_RDMA_READ, {into.sge()}, target), 0);
    EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
    return !find_wrong_byte(into.buffer.bytes(), 1);
  }
  bool reads_by_its_device() const { return reads(loop, into, pair.to_target()); }
  bool reads_by_other_device() const {
    return reads(other_loop, into_other, {.remote_addr = pair.target.address(), .rkey = of_other->rkey});
  }

  Pair pair;
  Device other = open_device(1);
  Region into;
  Region into_other;
  Mr of_other;
  Endpoint loop;
  Endpoint other_loop;
};

// Registered memory that the program gives back without deregistering it. Its addresses stay reserved: another thread
// might get them for its own memory.
struct UnmappedLater {
  static constexpr std::size_t kBytes = 1U << 16;

  explicit UnmappedLater(ibv_pd* pd) : mr(reg_mr(pd, memory, kBytes)) {}
  ~UnmappedLater() { munmap(memory, kBytes); }
  UnmappedLater(const UnmappedLater&) = delete;
  UnmappedLater& operator=(const UnmappedLater&) = delete;

  void unmap() const {
    ASSERT_EQ(mmap(memory, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), memory);
  }
  ibv_sge sge() const { return {address, 100, mr->lkey}; }
  SendOptions target() const { return {.remote_addr = address, .rkey = mr->rkey}; }

  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const std::uint64_t address = reinterpret_cast<std::uint64_t>(memory);
  Mr mr;
};

// An empty message that completes a receive of a QP connected to itself.
void receive_empty(const Endpoint& endpoint, ibv_wr_opcode opcode) {
  ASSERT_EQ(post_recv(endpoint.qp(), {}), 0);
  ASSERT_EQ(post(endpoint.qp(), opcode, {}), 0);
  EXPECT_EQ(poll_one(endpoint.recv_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
}

TEST(LateHostWrites, Read_ShowsThoseOfItsDeviceOnly) {
  check_in_child(kLateUntilShown, [] {
    const LateTarget late;
    late.write();
    EXPECT_TRUE(late.is_untouched());
    EXPECT_FALSE(late.reads_by_other_device());
    // It reads no memory.
    EXPECT_EQ(post(late.loop.qp(), IBV_WR_RDMA_READ, {}, late.pair.to_target()), 0);
    EXPECT_EQ(poll_one(late.loop.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_TRUE(late.is_untouched());
    EXPECT_TRUE(late.reads_by_its_device());
    EXPECT_TRUE(late.has_arrived());
  });
}

TEST(LateHostWrites, ReceiveOfTheirDevice_ShowsThem) {
  for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE_WITH_IMM}) {
    check_in_child(kLateUntilShown, [opcode] {
      const LateTarget late;
      late.write();
      receive_empty(late.other_loop, opcode);
      EXPECT_TRUE(late.is_untouched());
      receive_empty(late.loop, opcode);
      EXPECT_TRUE(late.has_arrived());
    });
  }
}

TEST(LateHostWrites, UnreliableReceive_ShowsThem) {
  for (const ibv_qp_type type : {IBV_QPT_UC, IBV_QPT_UD}) {
    SCOPED_TRACE(type);
    check_in_child(kLateUntilShown, [type] {
      const LateTarget late;
      Endpoint a(late.pair.device, {.type = type});
      Endpoint b(late.pair.device, {.type = type});
      connect(a, b);
      late.write();
      EXPECT_TRUE(late.is_untouched());
      ASSERT_EQ(post_recv(b.qp(), {late.into.sge()}), 0);
      ibv_ah_attr path = a.rtr_attr(b.address()).ah_attr;
      const Ah ah(verbs().create_ah(late.pair.device.pd.get(), &path));
      ibv_send_wr request{};
      request.opcode = type == IBV_QPT_UD ? IBV_WR_SEND : IBV_WR_RDMA_WRITE_WITH_IMM;
      request.send_flags = IBV_SEND_SIGNALED;
      if (type == IBV_QPT_UD) {
        request.wr.ud.ah = ah.get();
        request.wr.ud.remote_qpn = b.qp()->qp_num;
        request.wr.ud.remote_qkey = EndpointOptions{}.qkey;
      }
      ibv_send_wr* bad = nullptr;
      ASSERT_EQ(ibv_post_send(a.qp(), &request, &bad), 0);
      EXPECT_EQ(poll_one(b.recv_cq()).status, IBV_WC_SUCCESS);
      EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
      EXPECT_TRUE(late.has_arrived());
    });
  }
}

TEST(LateHostWrites, ReceiveOfASharedQueue_ShowsThem) {
  check_in_child(kLateUntilShown, [] {
    const LateTarget late;
    const Srq srq = create_srq(late.pair.device.pd.get());
    Endpoint endpoint(late.pair.device, {.srq = srq.get()});
    connect(endpoint, endpoint);
    late.write();
    EXPECT_TRUE(late.is_untouched());
    ASSERT_EQ(post_srq_recv(srq.get(), {}), 0);
    ASSERT_EQ(post(endpoint.qp(), IBV_WR_SEND, {}), 0);
    EXPECT_EQ(poll_one(endpoint.recv_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_TRUE(late.has_arrived());
  });
}

TEST(LateHostWrites, ReceiveThatFails_ShowsNothing) {
  for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE_WITH_IMM}) {
    SCOPED_TRACE(opcode);
    Variables variables = kLateUntilShown;
    variables.emplace_back("SOFTVERBS_FAULTS", "complete op=recv nth=1 status=LOC_LEN_ERR");
    check_in_child(variables, [opcode] {
      const LateTarget late;
      late.write();
      ASSERT_EQ(post_recv(late.pair.b.qp(), {late.pair.target.sge()}), 0);
      ASSERT_EQ(post(late.pair.a.qp(), opcode, {late.pair.source.sge()}, late.pair.to_target()), 0);
      EXPECT_EQ(poll_one(late.pair.b.recv_cq()).status, IBV_WC_LOC_LEN_ERR);
      EXPECT_EQ(poll_one(late.pair.a.send_cq()).status, IBV_WC_REM_INV_REQ_ERR);
      EXPECT_TRUE(late.is_untouched());
      EXPECT_TRUE(late.reads_by_its_device());
    });
  }
}

TEST(LateHostWrites, PayloadOfAReceive_IsThereWithItsCompletion) {
  check_in_child(kLateUntilShown, [] {
    const Pair pair(Timers{}, 3 << 20);  // several steps
    pair.source.fill(1);
    for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE_WITH_IMM}) {
      pair.target.buffer.poison();
      ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge()}), 0);
      ASSERT_EQ(post(pair.a.qp(), opcode, {pair.source.sge()}, pair.to_target()), 0);
      EXPECT_EQ(poll_one(pair.b.recv_cq()).status, IBV_WC_SUCCESS);
      EXPECT_EQ(find_wrong_byte(pair.target.buffer.bytes(), 1), std::nullopt);
      EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    }
  });
}

TEST(LateHostWrites, Atomic_ShowsThem) {
  check_in_child(kLateUntilShown, [] {
    const LateTarget late;
    const Region word(late.pair.device.pd.get(), 8, 0, kAllAccess | IBV_ACCESS_REMOTE_ATOMIC);
    std::memset(word.buffer.data(), 0, 8);
    late.write();
    EXPECT_TRUE(late.is_untouched());
    ASSERT_EQ(post_atomic(late.pair.a.qp(), IBV_WR_ATOMIC_FETCH_AND_ADD, late.into.sge(0, 8),
                          {.remote_addr = word.address(), .rkey = word.mr->rkey}, 1),
              0);
    EXPECT_EQ(poll_one(late.pair.a.send_cq()).status, IBV_WC_SUCCESS);
    std::uint64_t found = 0;
    std::memcpy(&found, word.buffer.data(), sizeof found);
    EXPECT_EQ(found, 1U);
    EXPECT_TRUE(late.has_arrived());
  });
}

TEST(LateHostWrites, FlushCompletionsAndTheEndOfTheQp_ShowNothing) {
  check_in_child(kLateUntilShown, [] {
    LateTarget late;
    ASSERT_EQ(post_recv(late.pair.b.qp(), {late.pair.target.sge()}, 7), 0);
    late.write();
    late.pair.b.to_error();
    const ibv_wc flushed = poll_one(late.pair.b.recv_cq());
    EXPECT_EQ(flushed.wr_id, 7U);
    EXPECT_EQ(flushed.status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_TRUE(late.is_untouched());
    late.pair.b.to_reset();
    late.pair.a.destroy();
    late.pair.b.destroy();
    EXPECT_TRUE(late.is_untouched());
    EXPECT_TRUE(late.reads_by_its_device());
    EXPECT_TRUE(late.has_arrived());
  });
}

TEST(LateHostWrites, Time_ShowsThem) {
  check_in_child({{"SOFTVERBS_LATE_HOST_MS", "20"}}, [] {
    const LateTarget late;
    for (int round = 0; round < 2; ++round) {
      const Stopwatch since_posted;
      late.write();
      for (Wait patience(kPatience); !late.has_arrived() && !patience.is_over();) patience.rest();
      EXPECT_TRUE(late.has_arrived());
      EXPECT_GE(since_posted.elapsed(), 20ms);
      late.pair.target.buffer.poison();
    }
  });
}

// A later write does not become visible with the first one.
TEST(LateHostWrites, Time_IsThatOfEachWrite) {
  check_in_child({{"SOFTVERBS_LATE_HOST_MS", "20"}}, [] {
    const LateTarget late;
    std::memset(late.pair.source.buffer.data(), 1, late.pair.source.buffer.size());
    const auto is_visible = [&](std::size_t at) { return late.pair.target.bytes(at, 1)[0] == std::byte{1}; };
    Stopwatch since_posted;
    std::size_t written = 0;
    Wait patience(kPatience);
    for (; !is_visible(0) && !patience.is_over(); patience.rest()) {
      if (written == 200 || (written != 0 && since_posted.elapsed() < 1ms)) continue;
      since_posted = {};
      const ibv_sge byte = late.pair.source.sge(written, 1);
      ASSERT_EQ(post(late.pair.a.qp(), IBV_WR_RDMA_WRITE, {byte}, late.pair.to_target(0, written)), 0);
      EXPECT_EQ(poll_one(late.pair.a.send_cq()).status, IBV_WC_SUCCESS);
      ++written;
    }
    ASSERT_GT(written, 0U);
    for (; !is_visible(written - 1) && !patience.is_over();) patience.rest();
    EXPECT_TRUE(is_visible(written - 1));
    EXPECT_GE(since_posted.elapsed(), 20ms);
  });
}

TEST(LateHostWrites, UnmappedMemory_IsDropped) {
  for (const bool deregisters : {false, true}) {
    SCOPED_TRACE(deregisters);
    check_in_child(kLateUntilShown, [deregisters] {
      const LateTarget late;
      UnmappedLater unmapped(late.pair.device.pd.get());
      ASSERT_EQ(post(late.pair.a.qp(), IBV_WR_RDMA_WRITE, {late.pair.source.sge()}, unmapped.target()), 0);
      EXPECT_EQ(poll_one(late.pair.a.send_cq()).status, IBV_WC_SUCCESS);
      late.write();
      unmapped.unmap();
      if (deregisters) {
        unmapped.mr.reset();
      } else {
        EXPECT_TRUE(late.reads_by_its_device());
      }
      EXPECT_TRUE(late.has_arrived());
    });
  }
}

TEST(LateHostWrites, UnmappedSource_IsAnErrorOfTheSender) {
  for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE}) {
    SCOPED_TRACE(opcode);
    check_in_child(kLateUntilShown, [opcode] {
      const LateTarget late;
      UnmappedLater unmapped(late.pair.device.pd.get());
      unmapped.unmap();
      ASSERT_EQ(post_recv(late.pair.b.qp(), {late.pair.target.sge()}), 0);
      ASSERT_EQ(post(late.pair.a.qp(), opcode, {unmapped.sge()}, late.pair.to_target()), 0);
      EXPECT_EQ(poll_one(late.pair.a.send_cq()).status, IBV_WC_LOC_PROT_ERR);
      EXPECT_EQ(late.pair.b.state(), IBV_QPS_RTS);
    });
  }
}

TEST(LateHostWrites, Deregistration_ShowsThemAndNothingIsWrittenAfterwards) {
  check_in_child(kLateUntilShown, [] {
    LateTarget late;
    late.write();
    EXPECT_TRUE(late.is_untouched());
    late.of_other.reset();  // that of another device
    EXPECT_TRUE(late.is_untouched());
    late.pair.target.mr.reset();
    EXPECT_TRUE(late.has_arrived());
    late.pair.target.buffer.poison();
    LateTarget::reads(late.loop, late.into,
                      {.remote_addr = late.pair.source.address(), .rkey = late.pair.source.mr->rkey});
    EXPECT_TRUE(late.is_untouched());
  });
}

TEST(LateHostWrites, MoreThanADeviceHoldsBack_FirstOnesAreVisible) {
  constexpr std::size_t kMany = 3 << 20;
  constexpr std::size_t kFew = 300;
  check_in_child(kLateUntilShown, [] {
    const LateTarget late(kMany);
    late.write();
    EXPECT_EQ(find_wrong_byte(late.pair.target.bytes(0, kMany / 3), 1), std::nullopt);
    EXPECT_EQ(late.pair.target.buffer.untouched_outside(0, kMany * 2 / 3), "");
    EXPECT_TRUE(late.reads_by_its_device());
    late.pair.target.buffer.poison();
    for (std::size_t i = 0; i < kFew; ++i) {
      ASSERT_EQ(post(late.pair.a.qp(), IBV_WR_RDMA_WRITE, {late.pair.source.sge(i, 1)}, late.pair.to_target(i, i)), 0);
      EXPECT_EQ(poll_one(late.pair.a.send_cq()).status, IBV_WC_SUCCESS);
    }
    EXPECT_EQ(find_wrong_byte(late.pair.target.bytes(0, kFew / 2), 1), std::nullopt);
    EXPECT_EQ(late.pair.target.buffer.untouched_outside(0, kFew - 1), "");
  });
}

// The owner's READ shows what another process has written, also when that has died.
TEST(LateHostWrites, OfAPeer_AreShownByAReadOfTheOwner) {
  check_in_child(kLateUntilShown, [] {
    const LateTarget late;
    Endpoint endpoint(late.pair.device);
    Peer peer;
    endpoint.connect(peer.address());
    peer.connect(endpoint.address());
    peer.fill(0, late.into.buffer.size(), 1);
    ASSERT_EQ(peer.post(IBV_WR_RDMA_WRITE, 0, late.into.buffer.size(), late.pair.to_target()), 0);
    EXPECT_EQ(peer.poll_sent().status, IBV_WC_SUCCESS);
    EXPECT_TRUE(late.is_untouched());
    peer.kill();
    EXPECT_TRUE(late.reads_by_its_device());
    EXPECT_TRUE(late.has_arrived());
  });
}

// A QP of this process that is connected to another process, and waits for its answers without a limit.
struct LatePeer {
  LatePeer() {
    endpoint.connect(peer.address());
    peer.connect(endpoint.address());
  }
  void send(ibv_wr_opcode opcode, std::vector<ibv_sge> sges) const {
    ASSERT_EQ(post(endpoint.qp(), opcode, std::move(sges), peer.target(0)), 0);
  }
  ibv_wc_status poll_sent() const { return poll_one(endpoint.send_cq()).status; }

  LateTarget late;
  Endpoint endpoint{late.pair.device, {.timers = {.timeout = 0}}};
  Peer peer{{.access = kAllAccess | IBV_ACCESS_REMOTE_ATOMIC}};
};

// Where the processes may not access each other's memory.
Variables forbidden_with(const char* engine) {
  Variables variables = kLateUntilShown;
  variables.emplace_back("SOFTVERBS_CROSS_MEMORY", "forbidden");
  variables.emplace_back("SOFTVERBS_ENGINE", engine);
  return variables;
}

TEST(LateHostWrites, AnswersAtTheRequester_ComeAfterThem) {
  for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD}) {
    SCOPED_TRACE(opcode);
    check_in_child(kLateUntilShown, [opcode] {
      LatePeer both;
      const LateTarget& late = both.late;
      const std::size_t bytes = opcode == IBV_WR_RDMA_READ ? late.into.buffer.size() : 8;
      both.peer.fill(0, bytes, 2);
      late.write();
      if (opcode == IBV_WR_RDMA_READ) {
        both.send(opcode, {late.pair.target.sge()});
      } else {
        ASSERT_EQ(post_atomic(both.endpoint.qp(), opcode, late.pair.target.sge(0, bytes), both.peer.target(0), 1), 0);
      }
      EXPECT_EQ(both.poll_sent(), IBV_WC_SUCCESS);
      EXPECT_EQ(find_wrong_byte(late.pair.target.bytes(0, bytes), 2), std::nullopt);
      late.reads_by_its_device();
      EXPECT_EQ(find_wrong_byte(late.pair.target.bytes(0, bytes), 2), std::nullopt);
    });
  }
}

TEST(LateHostWrites, ToAPeer_AreShownByAReadOfTheSenderAndByAReceive) {
  for (const Variables& variables : {kLateUntilShown, forbidden_with("thread")}) {
    SCOPED_TRACE(variables.size());
    check_in_child(variables, [] {
      LatePeer both;
      const std::size_t bytes = both.late.into.buffer.size();
      both.send(IBV_WR_RDMA_WRITE, {both.late.pair.source.sge()});
      EXPECT_EQ(both.poll_sent(), IBV_WC_SUCCESS);
      EXPECT_TRUE(both.peer.untouched_outside(0, 0));
      EXPECT_TRUE(LateTarget::reads(both.endpoint, both.late.into, both.peer.target(0)));
      EXPECT_EQ(both.peer.find_wrong_byte(0, bytes, 1), std::nullopt);
      both.peer.poison();
      both.send(IBV_WR_RDMA_WRITE, {both.late.pair.source.sge()});
      EXPECT_EQ(both.poll_sent(), IBV_WC_SUCCESS);
      EXPECT_TRUE(both.peer.untouched_outside(0, 0));
      both.peer.post_recv(bytes, 8, 1);
      both.send(IBV_WR_SEND, {});
      EXPECT_EQ(both.poll_sent(), IBV_WC_SUCCESS);
      EXPECT_EQ(both.peer.poll_received().status, IBV_WC_SUCCESS);
      EXPECT_EQ(both.peer.find_wrong_byte(0, bytes, 1), std::nullopt);
    });
  }
}

// Where only the target itself can make its memory visible, a receive waits for it, and completes once.
TEST(LateHostWrites, ReceiveOfAStoppedPeer_CompletesWhenItGoesOn) {
  for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE_WITH_IMM}) {
    SCOPED_TRACE(opcode);
    check_in_child(forbidden_with("thread"), [opcode] {
      LatePeer both;
      both.send(IBV_WR_RDMA_WRITE, {both.late.pair.source.sge()});
      EXPECT_EQ(both.poll_sent(), IBV_WC_SUCCESS);
      for (const std::uint64_t wr_id : {1U, 2U}) both.peer.post_recv(0, 1000, wr_id);
      both.peer.stop();
      both.send(opcode, {both.late.pair.source.sge()});
      // The engine has one thread: when it executes this request, the first attempt of the one before it has ended.
      receive_empty(both.late.loop, IBV_WR_SEND);
      EXPECT_TRUE(stays_empty(both.endpoint.send_cq()));
      both.peer.resume();
      EXPECT_EQ(both.poll_sent(), IBV_WC_SUCCESS);
      EXPECT_EQ(both.peer.poll_received().wr_id, 1U);
      EXPECT_EQ(both.peer.find_wrong_byte(0, 1000, 1), std::nullopt);
      both.send(opcode, {both.late.pair.source.sge()});
      EXPECT_EQ(both.poll_sent(), IBV_WC_SUCCESS);
      EXPECT_EQ(both.peer.poll_received().wr_id, 2U);
    });
  }
}

TEST(LateHostWrites, ToAPeerThatNobodyCanWrite_AreRefused) {
  check_in_child(forbidden_with("inline"), [] {
    const LatePeer both;
    both.send(IBV_WR_RDMA_WRITE, {both.late.pair.source.sge()});
    EXPECT_EQ(both.poll_sent(), IBV_WC_REM_OP_ERR);
  });
}

}  // namespace
}  // namespace verbatim::test
