// Limits: what the device reports can be used, calls beyond the limits fail, and objects in use cannot be destroyed.
#include <gtest/gtest.h>

#include <cerrno>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

class Limits : public testing::Test {
 protected:
  // errno of creating a QP with these capabilities; 0 on success.
  int create(const ibv_qp_cap& cap) {
    const Cq cq = create_cq(device, 1);
    ibv_qp_init_attr attr{};
    attr.send_cq = attr.recv_cq = cq.get();
    attr.cap = cap;
    attr.qp_type = IBV_QPT_RC;
    errno = 0;
    const Qp qp(verbs().create_qp(device.pd.get(), &attr));
    if (!qp) return errno;
    EXPECT_GE(attr.cap.max_send_wr, cap.max_send_wr);
    EXPECT_GE(attr.cap.max_recv_wr, cap.max_recv_wr);
    EXPECT_GE(attr.cap.max_send_sge, cap.max_send_sge);
    EXPECT_GE(attr.cap.max_recv_sge, cap.max_recv_sge);
    EXPECT_GE(attr.cap.max_inline_data, cap.max_inline_data);
    return 0;
  }

  Device device = open_device();
  std::uint32_t max_wr = static_cast<std::uint32_t>(device.attr.max_qp_wr);
  std::uint32_t max_sge = static_cast<std::uint32_t>(device.attr.max_sge);
  Region source{device.pd.get(), 4096};
  Region target{device.pd.get(), 4096};
};

TEST_F(Limits, QpCapabilityBeyondLimit_IsRefused) {
  EXPECT_EQ(create({1, 1, 1, 1, 0}), 0);
  EXPECT_EQ(create({max_wr, max_wr, 1, 1, 0}), 0);
  EXPECT_EQ(create({1, 1, max_sge, max_sge, 0}), 0);
  EXPECT_EQ(create({max_wr + 1, 1, 1, 1, 0}), EINVAL);
  EXPECT_EQ(create({1, max_wr + 1, 1, 1, 0}), EINVAL);
  EXPECT_EQ(create({1, 1, max_sge + 1, 1, 0}), EINVAL);
  EXPECT_EQ(create({1, 1, 1, max_sge + 1, 0}), EINVAL);
  EXPECT_EQ(create({1, 1, 1, 1, 1U << 24}), EINVAL);
}

// A QP type is either created with this type or create_error with an errno for unsupported types.
TEST_F(Limits, OtherTransport_IsCreated_OrRefused) {
  for (const ibv_qp_type type : {IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_RAW_PACKET, IBV_QPT_XRC_SEND}) {
    const Cq cq = create_cq(device, 1);
    ibv_qp_init_attr attr{};
    attr.send_cq = attr.recv_cq = cq.get();
    attr.cap = {1, 1, 1, 1, 0};
    attr.qp_type = type;
    errno = 0;
    const Qp qp(verbs().create_qp(device.pd.get(), &attr));
    if (qp) {
      EXPECT_EQ(qp->qp_type, type);
    } else {
      EXPECT_TRUE(errno == EOPNOTSUPP || errno == EINVAL || errno == EPERM) << type << ": " << errno;
    }
  }
}

TEST_F(Limits, InvalidCqArgument_IsRefused) {
  const auto create_error = [&](int cqe, int vector) {
    errno = 0;
    const Cq cq(verbs().create_cq(device.context.get(), cqe, nullptr, nullptr, vector));
    return cq ? 0 : errno;
  };
  EXPECT_EQ(create_error(1, 0), 0);
  EXPECT_EQ(create_error(1, device.context->num_comp_vectors - 1), 0);
  EXPECT_EQ(create_error(0, 0), EINVAL);
  EXPECT_EQ(create_error(-1, 0), EINVAL);
  EXPECT_EQ(create_error(device.attr.max_cqe + 1, 0), EINVAL);
  EXPECT_EQ(create_error(1, device.context->num_comp_vectors), EINVAL);
  EXPECT_EQ(create_error(1, -1), EINVAL);
  const Cq cq = create_cq(device, 100);
  EXPECT_GE(cq->cqe, 100);
  EXPECT_NE(verbs().resize_cq(cq.get(), device.attr.max_cqe + 1), 0);
}

TEST_F(Limits, TooManySges_AreRefused) {
  Endpoint a(device, {.send_sge = 2, .recv_sge = 2});
  Endpoint b(device);
  connect(a, b);
  EXPECT_EQ(post(a.qp(), IBV_WR_SEND, std::vector<ibv_sge>(a.cap().max_send_sge + 1, source.sge(0, 1))), EINVAL);
  EXPECT_EQ(post_recv(a.qp(), std::vector<ibv_sge>(a.cap().max_recv_sge + 1, source.sge(0, 1))), EINVAL);
  EXPECT_EQ(a.state(), IBV_QPS_RTS);  // the call failed and did not change the QP
}

TEST_F(Limits, TooManyInlineBytes_AreRefused) {
  Endpoint a(device, {.inline_bytes = 32});
  Endpoint b(device);
  connect(a, b);
  const std::uint32_t limit = a.cap().max_inline_data;
  ASSERT_GE(limit, 32U);
  const Region large(device.pd.get(), limit + 1);
  const SendOptions options{
      .flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED, .remote_addr = target.address(), .rkey = target.mr->rkey};
  EXPECT_NE(post(a.qp(), IBV_WR_RDMA_WRITE, {large.sge()}, options), 0);
  EXPECT_NE(post(a.qp(), IBV_WR_RDMA_READ, {large.sge(0, 8)}, options), 0);  // a READ sends no inline data
  ASSERT_LE(limit, target.buffer.size());
  EXPECT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {large.sge(0, limit)}, options), 0);
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
}

TEST_F(Limits, UnknownOpcode_IsRefused) {
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  EXPECT_EQ(post(a.qp(), static_cast<ibv_wr_opcode>(15), {source.sge(0, 1)}), EINVAL);
}

// The send queue stays full, because its first request waits for a receive.
TEST_F(Limits, FullSendQueue_ReturnsBadRequest_AndKeepsEarlierOnes) {
  Endpoint a(device, {.send_wr = 8});
  Endpoint b(device, {.recv_wr = 512});
  connect(a, b);
  const std::uint32_t depth = a.cap().max_send_wr;
  ASSERT_LE(depth, 500U);
  std::vector<ibv_send_wr> wrs(depth + 2);
  ibv_sge sge = source.sge(0, 16);
  for (std::size_t i = 0; i < wrs.size(); ++i) {
    wrs[i] = {};
    wrs[i].wr_id = i;
    wrs[i].next = i + 1 < wrs.size() ? &wrs[i + 1] : nullptr;
    wrs[i].sg_list = &sge;
    wrs[i].num_sge = 1;
    wrs[i].opcode = IBV_WR_SEND;
    wrs[i].send_flags = IBV_SEND_SIGNALED;
  }
  ibv_send_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_send(a.qp(), wrs.data(), &bad), ENOMEM);
  EXPECT_EQ(bad, &wrs[depth]);
  EXPECT_EQ(post(a.qp(), IBV_WR_SEND, {sge}), ENOMEM);
  EXPECT_TRUE(stays_empty(a.send_cq()));
  for (std::uint64_t i = 0; i < depth; ++i) ASSERT_EQ(post_recv(b.qp(), {target.sge()}, i), 0);
  for (std::uint64_t i = 0; i < depth; ++i) {
    const ibv_wc wc = poll_one(a.send_cq());
    ASSERT_EQ(wc.wr_id, i);
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
  }
  EXPECT_TRUE(stays_empty(a.send_cq()));  // the requests that did not fit were not sent
  ASSERT_EQ(post_recv(b.qp(), {target.sge()}), 0);
  EXPECT_EQ(post(a.qp(), IBV_WR_SEND, {sge}), 0);
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
}

TEST_F(Limits, FullReceiveQueue_ReturnsBadRequest_AndKeepsEarlierOnes) {
  Endpoint a(device, {.send_wr = 512});
  Endpoint b(device, {.recv_wr = 8});
  connect(a, b);
  const std::uint32_t depth = b.cap().max_recv_wr;
  ASSERT_LE(depth, 500U);
  std::vector<ibv_recv_wr> wrs(depth + 2);
  ibv_sge sge = target.sge(0, 64);
  for (std::size_t i = 0; i < wrs.size(); ++i) {
    wrs[i] = {i, i + 1 < wrs.size() ? &wrs[i + 1] : nullptr, &sge, 1};
  }
  ibv_recv_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_recv(b.qp(), wrs.data(), &bad), ENOMEM);
  EXPECT_EQ(bad, &wrs[depth]);
  for (std::uint64_t i = 0; i < depth; ++i) {
    ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, 8)}, {.flags = 0}), 0);
    ASSERT_EQ(poll_one(b.recv_cq()).wr_id, i);
  }
  EXPECT_EQ(post_recv(b.qp(), {sge}), 0);
}

TEST_F(Limits, ListWithBadRequest_StopsAtIt) {
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  source.fill(1);
  ibv_sge sge = source.sge(0, 100);
  std::vector<ibv_sge> too_many(a.cap().max_send_sge + 1, source.sge(0, 1));
  ibv_send_wr wrs[3] = {};
  for (std::size_t i = 0; i < 3; ++i) {
    wrs[i].wr_id = i;
    wrs[i].next = i < 2 ? &wrs[i + 1] : nullptr;
    wrs[i].sg_list = &sge;
    wrs[i].num_sge = 1;
    wrs[i].opcode = IBV_WR_RDMA_WRITE;
    wrs[i].send_flags = IBV_SEND_SIGNALED;
    wrs[i].wr.rdma.remote_addr = target.address(1000 * i);
    wrs[i].wr.rdma.rkey = target.mr->rkey;
  }
  wrs[1].sg_list = too_many.data();
  wrs[1].num_sge = static_cast<int>(too_many.size());
  ibv_send_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_send(a.qp(), wrs, &bad), EINVAL);
  EXPECT_EQ(bad, &wrs[1]);
  EXPECT_EQ(poll_one(a.send_cq()).wr_id, 0U);
  EXPECT_TRUE(stays_empty(a.send_cq()));
  EXPECT_EQ(find_wrong_byte(target.bytes(0, 100), 1), std::nullopt);
  EXPECT_EQ(target.buffer.untouched_outside(0, 100), "");
}

TEST_F(Limits, QueueOfAnotherContext_IsRefused) {
  const Device other = open_device();
  const Cq own = create_cq(device);
  const Cq other_cq = create_cq(other);
  const Srq other_srq = create_srq(other.pd.get());
  const auto create_error = [&](ibv_cq* send_cq, ibv_cq* recv_cq, ibv_srq* srq) {
    ibv_qp_init_attr attr{};
    attr.send_cq = send_cq;
    attr.recv_cq = recv_cq;
    attr.srq = srq;
    attr.cap = {1, 1, 1, 1, 0};
    attr.qp_type = IBV_QPT_RC;
    errno = 0;
    const Qp qp(verbs().create_qp(device.pd.get(), &attr));
    return qp ? 0 : errno;
  };
  EXPECT_EQ(create_error(own.get(), own.get(), nullptr), 0);
  EXPECT_EQ(create_error(other_cq.get(), own.get(), nullptr), EINVAL);
  EXPECT_EQ(create_error(own.get(), other_cq.get(), nullptr), EINVAL);
  EXPECT_EQ(create_error(own.get(), own.get(), other_srq.get()), EINVAL);
  const Channel other_channel(verbs().create_comp_channel(other.context.get()));
  const Cq cq(verbs().create_cq(device.context.get(), 1, nullptr, other_channel.get(), 0));
  EXPECT_EQ(cq, nullptr);
}

TEST_F(Limits, DestroyOfObjectInUse_IsBusy) {
  Channel channel(verbs().create_comp_channel(device.context.get()));
  ASSERT_NE(channel, nullptr);
  Cq send_cq = create_cq(device, 16, channel.get());
  Cq recv_cq = create_cq(device);
  EXPECT_EQ(verbs().destroy_comp_channel(channel.get()), EBUSY);
  {
    const Endpoint endpoint(device, {.send_cq = send_cq.get(), .recv_cq = recv_cq.get()});
    EXPECT_EQ(verbs().destroy_cq(send_cq.get()), EBUSY);
    EXPECT_EQ(verbs().destroy_cq(recv_cq.get()), EBUSY);
  }
  send_cq.reset();  // the deleters fail the test when a CQ is still in use
  recv_cq.reset();
  channel.reset();
}

}  // namespace
}  // namespace verbatim::test
