// Shared receive queues: receives shared by several QPs, the limit event, and destruction.
#include <gtest/gtest.h>

#include <cerrno>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

class SharedReceiveQueue : public testing::Test {
 protected:
  void SetUp() override {
    connect(sender_a, receiver_a);
    connect(sender_b, receiver_b);
  }

  int send(Endpoint& from, std::size_t length = 16) {
    return post(from.qp(), IBV_WR_SEND, {source.sge(0, length)}, {.flags = 0});
  }
  int set_limit(std::uint32_t limit) {
    ibv_srq_attr attr{};
    attr.srq_limit = limit;
    return verbs().modify_srq(srq.get(), &attr, IBV_SRQ_LIMIT);
  }
  std::uint32_t limit() {
    ibv_srq_attr attr{};
    EXPECT_EQ(verbs().query_srq(srq.get(), &attr), 0);
    return attr.srq_limit;
  }

  Device device = open_device();
  Region source{device.pd.get(), 4096};
  Region target{device.pd.get(), 4096};
  Srq srq = create_srq(device.pd.get(), 16);
  Cq cq = create_cq(device);
  Endpoint sender_a{device};
  Endpoint sender_b{device};
  Endpoint receiver_a{device, {.recv_cq = cq.get(), .srq = srq.get()}};
  Endpoint receiver_b{device, {.recv_cq = cq.get(), .srq = srq.get()}};
};

TEST_F(SharedReceiveQueue, Receives_AreConsumedInPostingOrder) {
  source.fill(1);
  for (std::uint64_t i = 0; i < 8; ++i) ASSERT_EQ(post_srq_recv(srq.get(), {target.sge(64 * i, 64)}, i), 0);
  for (std::uint64_t i = 0; i < 8; ++i) {
    Endpoint& sender = i % 3 == 0 ? sender_a : sender_b;
    ASSERT_EQ(send(sender, 10 + i), 0);
    const ibv_wc wc = poll_one(cq.get());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, i);
    EXPECT_EQ(wc.byte_len, 10 + i);
    EXPECT_EQ(wc.qp_num, (i % 3 == 0 ? receiver_a : receiver_b).qp()->qp_num);
    EXPECT_EQ(find_wrong_byte(target.bytes(64 * i, 10 + i), 1), std::nullopt);
  }
}

TEST_F(SharedReceiveQueue, WriteWithImm_ConsumesAReceive) {
  ASSERT_EQ(post_srq_recv(srq.get(), {}, 3), 0);
  ASSERT_EQ(post(sender_b.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, {source.sge(0, 100)},
                 {.remote_addr = target.address(), .rkey = target.mr->rkey, .imm = 7}),
            0);
  const ibv_wc wc = poll_one(cq.get());
  EXPECT_EQ(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_EQ(wc.wr_id, 3U);
  EXPECT_EQ(wc.qp_num, receiver_b.qp()->qp_num);
}

TEST_F(SharedReceiveQueue, EmptyQueue_IsReceiverNotReady) {
  Endpoint sender(device, {.timers = {.rnr_retry = 0}});
  Endpoint receiver(device, {.srq = srq.get()});
  connect(sender, receiver);
  ASSERT_EQ(send(sender), 0);
  EXPECT_EQ(poll_one(sender.send_cq()).status, IBV_WC_RNR_RETRY_EXC_ERR);
}

TEST_F(SharedReceiveQueue, SendBeforePost_CompletesAfterThePost) {
  ASSERT_EQ(send(sender_a), 0);
  EXPECT_TRUE(stays_empty(cq.get()));
  ASSERT_EQ(post_srq_recv(srq.get(), {target.sge()}, 4), 0);
  EXPECT_EQ(poll_one(cq.get()).wr_id, 4U);
}

TEST_F(SharedReceiveQueue, FullQueue_ReturnsBadRequest) {
  ibv_srq_attr attr{};
  ASSERT_EQ(verbs().query_srq(srq.get(), &attr), 0);
  ASSERT_GE(attr.max_wr, 16U);
  std::vector<ibv_recv_wr> wrs(attr.max_wr + 2);
  ibv_sge sge = target.sge(0, 64);
  for (std::size_t i = 0; i < wrs.size(); ++i) {
    wrs[i] = {i, i + 1 < wrs.size() ? &wrs[i + 1] : nullptr, &sge, 1};
  }
  ibv_recv_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_srq_recv(srq.get(), wrs.data(), &bad), ENOMEM);
  EXPECT_EQ(bad, &wrs[attr.max_wr]);
  for (std::uint64_t i = 0; i < attr.max_wr; ++i) {  // the receives before it were posted
    ASSERT_EQ(send(sender_a), 0);
    ASSERT_EQ(poll_one(cq.get()).wr_id, i);
  }
  EXPECT_EQ(post_srq_recv(srq.get(), {target.sge()}), 0);  // their queue entries are free again
}

TEST_F(SharedReceiveQueue, TooManySges_AreRefused) {
  ibv_srq_attr attr{};
  ASSERT_EQ(verbs().query_srq(srq.get(), &attr), 0);
  EXPECT_EQ(post_srq_recv(srq.get(), std::vector<ibv_sge>(attr.max_sge + 1, target.sge(0, 1))), EINVAL);
}

TEST_F(SharedReceiveQueue, PostRecvOnQpWithSrq_IsRefused) {
  EXPECT_EQ(post_recv(receiver_a.qp(), {target.sge()}), EINVAL);
}

TEST_F(SharedReceiveQueue, Buffers_AreCheckedAgainstTheSrqsPd) {
  const Pd other = alloc_pd(device);
  Endpoint sender(device);
  Endpoint receiver(device, {.pd = other.get(), .srq = srq.get()});
  connect(sender, receiver);
  ASSERT_EQ(post_srq_recv(srq.get(), {target.sge()}, 1), 0);
  ASSERT_EQ(send(sender), 0);
  EXPECT_EQ(poll_one(receiver.recv_cq()).status, IBV_WC_SUCCESS);
  const Region other_domain(other.get(), 64);
  ASSERT_EQ(post_srq_recv(srq.get(), {other_domain.sge()}, 2), 0);
  ASSERT_EQ(send(sender), 0);
  EXPECT_EQ(poll_one(receiver.recv_cq()).status, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(poll_one(sender.send_cq()).status, IBV_WC_REM_OP_ERR);
  EXPECT_EQ(other_domain.buffer.untouched_outside(0, 0), "");
}

TEST_F(SharedReceiveQueue, LimitReached_IsReportedOnce) {
  for (std::uint64_t i = 0; i < 6; ++i) ASSERT_EQ(post_srq_recv(srq.get(), {target.sge()}, i), 0);
  ASSERT_EQ(set_limit(4), 0);
  EXPECT_EQ(limit(), 4U);
  for (int i = 0; i < 2; ++i) {  // 6 to 4: at the limit, not below
    ASSERT_EQ(send(sender_a), 0);
    poll_one(cq.get());
  }
  EXPECT_FALSE(next_async_event(device.context.get(), 20ms));
  ASSERT_EQ(send(sender_b), 0);
  EXPECT_EQ(expect_async_event(device.context.get(), IBV_EVENT_SRQ_LIMIT_REACHED).srq, srq.get());
  EXPECT_EQ(limit(), 0U);  // disarmed
  ASSERT_EQ(send(sender_b), 0);
  poll(cq.get(), 2);
  EXPECT_FALSE(next_async_event(device.context.get(), 20ms));
}

TEST_F(SharedReceiveQueue, LimitBeyondMaxWr_IsRefused) {
  ibv_srq_attr attr{};
  ASSERT_EQ(verbs().query_srq(srq.get(), &attr), 0);
  EXPECT_EQ(set_limit(attr.max_wr + 1), EINVAL);
  EXPECT_EQ(limit(), 0U);
}

TEST_F(SharedReceiveQueue, FailedQp_RaisesLastWqe_AndKeepsReceives) {
  ASSERT_EQ(post_srq_recv(srq.get(), {target.sge()}, 1), 0);
  receiver_a.to_error();
  EXPECT_EQ(expect_async_event(device.context.get(), IBV_EVENT_QP_LAST_WQE_REACHED).qp, receiver_a.qp());
  EXPECT_TRUE(stays_empty(cq.get()));  // receives of an SRQ belong to no QP and are not flushed
  ASSERT_EQ(send(sender_b), 0);
  EXPECT_EQ(poll_one(cq.get()).wr_id, 1U);
}

TEST_F(SharedReceiveQueue, DestroyWithQps_IsBusy) {
  EXPECT_EQ(verbs().destroy_srq(srq.get()), EBUSY);
  receiver_a.destroy();
  EXPECT_EQ(verbs().destroy_srq(srq.get()), EBUSY);
  receiver_b.destroy();
  srq.reset();
}

TEST_F(SharedReceiveQueue, SizeBeyondDeviceLimit_IsRefused) {
  ibv_srq_init_attr attr{};
  attr.attr.max_wr = static_cast<std::uint32_t>(device.attr.max_srq_wr) + 1;
  attr.attr.max_sge = 1;
  errno = 0;
  EXPECT_EQ(verbs().create_srq(device.pd.get(), &attr), nullptr);
  EXPECT_EQ(errno, EINVAL);
  attr.attr.max_wr = 1;
  attr.attr.max_sge = static_cast<std::uint32_t>(device.attr.max_srq_sge) + 1;
  errno = 0;
  EXPECT_EQ(verbs().create_srq(device.pd.get(), &attr), nullptr);
  EXPECT_EQ(errno, EINVAL);
  attr.attr.max_sge = static_cast<std::uint32_t>(device.attr.max_srq_sge);
  const Srq largest(verbs().create_srq(device.pd.get(), &attr));
  ASSERT_NE(largest, nullptr);
  EXPECT_GE(attr.attr.max_sge, static_cast<std::uint32_t>(device.attr.max_srq_sge));
}

}  // namespace
}  // namespace verbatim::test
