// Unreliable connections: SEND and RDMA WRITE without acknowledgements. A request completes when it has been sent. A
// message that the peer cannot execute is dropped, and neither end reports an error.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

constexpr std::size_t kUcRegionBytes = (3U << 20) + 4096;
constexpr std::size_t kUcLong = (3U << 20) + 5;  // several steps of the device
constexpr std::size_t kUcSizes[] = {0, 1, 64, 4096, 4097, (1U << 20) + 1, kUcLong};

class UnreliableConnection : public testing::Test {
 protected:
  void SetUp() override { connect(a, b); }

  std::vector<ibv_sge> part(const Region& region, std::size_t length) const {
    if (length == 0) return {};
    return {region.sge(0, length)};
  }
  SendOptions to_target(std::uint64_t wr_id = 0) const {
    return {.wr_id = wr_id, .remote_addr = target.address(), .rkey = target.mr->rkey};
  }
  void expect_sent(std::uint64_t wr_id, ibv_wc_opcode opcode) {
    const ibv_wc wc = poll_one(a.send_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, wr_id);
    EXPECT_EQ(wc.opcode, opcode);
  }
  // A SEND of one byte arrives in the receive that waits, and is the first message that arrives.
  void expect_next_arrives(std::uint64_t receive) {
    source.buffer.data()[0] = std::byte{77};
    ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, 1)}, {.wr_id = 999}), 0);
    expect_sent(999, IBV_WC_SEND);
    const ibv_wc wc = poll_one(b.recv_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, receive);
    EXPECT_EQ(wc.byte_len, 1U);
    EXPECT_EQ(target.buffer.data()[0], std::byte{77});
  }

  Device device = open_device();
  Region source{device.pd.get(), kUcRegionBytes};
  Region target{device.pd.get(), kUcRegionBytes, 3};
  Endpoint a{device, {.type = IBV_QPT_UC}};
  Endpoint b{device, {.type = IBV_QPT_UC}};
};

TEST_F(UnreliableConnection, Send_OfAnySize_ArrivesWhole) {
  for (const std::size_t size : kUcSizes) {
    SCOPED_TRACE(size);
    source.fill(size);
    target.buffer.poison();
    ASSERT_EQ(post_recv(b.qp(), part(target, size), 1), 0);
    ASSERT_EQ(post(a.qp(), IBV_WR_SEND_WITH_IMM, part(source, size), {.wr_id = 2, .imm = 0xABCD}), 0);
    expect_sent(2, IBV_WC_SEND);
    const ibv_wc wc = poll_one(b.recv_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.opcode, IBV_WC_RECV);
    EXPECT_EQ(wc.byte_len, size);
    EXPECT_EQ(wc.imm_data, 0xABCDU);
    EXPECT_EQ(wc.wc_flags, unsigned{IBV_WC_WITH_IMM});
    EXPECT_EQ(wc.qp_num, b.qp()->qp_num);
    EXPECT_EQ(find_wrong_byte(target.bytes(0, size), size), std::nullopt);
    EXPECT_EQ(target.buffer.untouched_outside(0, size), "");
  }
}

TEST_F(UnreliableConnection, Write_OfAnySize_ArrivesWhole) {
  for (const std::size_t size : kUcSizes) {
    SCOPED_TRACE(size);
    source.fill(size + 1);
    target.buffer.poison();
    ASSERT_EQ(post_recv(b.qp(), {}, 1), 0);
    ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, part(source, size), to_target(3)), 0);
    SendOptions with_imm = to_target(4);
    with_imm.imm = 7;
    ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, part(source, size), with_imm), 0);
    expect_sent(3, IBV_WC_RDMA_WRITE);
    expect_sent(4, IBV_WC_RDMA_WRITE);
    const ibv_wc wc = poll_one(b.recv_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
    EXPECT_EQ(wc.imm_data, 7U);
    EXPECT_EQ(find_wrong_byte(target.bytes(0, size), size + 1), std::nullopt);
    EXPECT_EQ(target.buffer.untouched_outside(0, size), "");
  }
}

TEST_F(UnreliableConnection, ManyMessages_ArriveInOrder) {
  constexpr std::uint64_t kCount = 1000;
  std::uint64_t posted = 0;
  for (; posted < 32; ++posted) ASSERT_EQ(post_recv(b.qp(), {target.sge(posted * 64, 64)}, posted), 0);
  for (std::uint64_t message = 0; message < kCount; ++message) {
    source.fill(message);
    ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, 64)}, {.wr_id = message, .flags = IBV_SEND_SIGNALED}), 0);
    expect_sent(message, IBV_WC_SEND);
    const ibv_wc wc = poll_one(b.recv_cq());
    ASSERT_EQ(wc.wr_id, message);
    const std::size_t at = message % 32 * 64;
    EXPECT_EQ(find_wrong_byte(target.bytes(at, 64), message), std::nullopt);
    ASSERT_EQ(post_recv(b.qp(), {target.sge(at, 64)}, posted++), 0);
  }
}

TEST_F(UnreliableConnection, MessageWithoutReceive_IsDropped) {
  ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, 8)}, {.wr_id = 1}), 0);
  expect_sent(1, IBV_WC_SEND);
  target.buffer.poison();
  ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, {source.sge(0, 8)}, to_target(2)), 0);
  expect_sent(2, IBV_WC_RDMA_WRITE);
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 64)}, 3), 0);
  EXPECT_TRUE(stays_empty(b.recv_cq()));
  EXPECT_EQ(a.state(), IBV_QPS_RTS);
  EXPECT_EQ(b.state(), IBV_QPS_RTS);
  expect_next_arrives(3);
}

TEST_F(UnreliableConnection, SendLongerThanReceive_IsDropped_AndLeavesTheReceive) {
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 64)}, 3), 0);
  for (const std::size_t size : {std::size_t{65}, kUcLong}) {
    ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, size)}, {.wr_id = size}), 0);
    expect_sent(size, IBV_WC_SEND);
  }
  EXPECT_TRUE(stays_empty(b.recv_cq()));
  EXPECT_EQ(b.state(), IBV_QPS_RTS);
  expect_next_arrives(3);
}

TEST_F(UnreliableConnection, SendLongerThanSharedReceive_EndsTheReceive) {
  const Srq srq = create_srq(device.pd.get());
  Endpoint c(device, {.type = IBV_QPT_UC});
  Endpoint d(device, {.srq = srq.get(), .type = IBV_QPT_UC});
  connect(c, d);
  ASSERT_EQ(post_srq_recv(srq.get(), {target.sge(0, 64)}, 3), 0);
  ASSERT_EQ(post_srq_recv(srq.get(), {target.sge(0, 64)}, 4), 0);
  ASSERT_EQ(post(c.qp(), IBV_WR_SEND, {source.sge(0, 65)}, {.wr_id = 1}), 0);
  EXPECT_EQ(poll_one(c.send_cq()).status, IBV_WC_SUCCESS);
  ibv_wc wc = poll_one(d.recv_cq());
  EXPECT_EQ(wc.wr_id, 3U);
  EXPECT_NE(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(d.state(), IBV_QPS_RTS);
  ASSERT_EQ(post(c.qp(), IBV_WR_SEND, {source.sge(0, 64)}, {.wr_id = 2}), 0);
  EXPECT_EQ(poll_one(c.send_cq()).status, IBV_WC_SUCCESS);
  wc = poll_one(d.recv_cq());
  EXPECT_EQ(wc.wr_id, 4U);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
}

// A wrong key, a wrong range, or a QP that does not allow WRITEs.
TEST_F(UnreliableConnection, WriteThatIsNotAllowed_IsDropped) {
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 64)}, 3), 0);
  target.buffer.poison();
  SendOptions wrong_key = to_target(1);
  wrong_key.rkey ^= 1;
  SendOptions outside = to_target(2);
  outside.remote_addr += kUcRegionBytes - 7;
  for (const SendOptions& options : {wrong_key, outside}) {
    ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, {source.sge(0, 8)}, options), 0);
    expect_sent(options.wr_id, IBV_WC_RDMA_WRITE);
  }
  ibv_qp_attr attr{};
  attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE;
  ASSERT_EQ(verbs().modify_qp(b.qp(), &attr, IBV_QP_ACCESS_FLAGS), 0);
  ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, 8)}, to_target(4)), 0);
  expect_sent(4, IBV_WC_RDMA_WRITE);
  EXPECT_TRUE(stays_empty(b.recv_cq()));
  EXPECT_EQ(target.buffer.untouched_outside(0, 0), "");
  EXPECT_EQ(b.state(), IBV_QPS_RTS);
  expect_next_arrives(3);
}

TEST_F(UnreliableConnection, MessageToDestroyedPeer_Completes) {
  b.destroy();
  ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, kUcLong)}, {.wr_id = 1}), 0);
  ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, 8)}, to_target(2)), 0);
  expect_sent(1, IBV_WC_SEND);
  expect_sent(2, IBV_WC_RDMA_WRITE);
  EXPECT_EQ(a.state(), IBV_QPS_RTS);
}

// The types of both ends must be the same.
TEST_F(UnreliableConnection, ReliablePeer_ReceivesNothing) {
  Endpoint unreliable(device, {.type = IBV_QPT_UC});
  Endpoint reliable(device);
  connect(unreliable, reliable);
  ASSERT_EQ(post_recv(reliable.qp(), {target.sge(0, 64)}, 1), 0);
  ASSERT_EQ(post(unreliable.qp(), IBV_WR_SEND, {source.sge(0, 8)}, {.wr_id = 1}), 0);
  EXPECT_EQ(poll_one(unreliable.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_TRUE(stays_empty(reliable.recv_cq()));
}

TEST_F(UnreliableConnection, ReadsAndAtomics_AreRefused) {
  EXPECT_EQ(post(a.qp(), IBV_WR_RDMA_READ, {source.sge(0, 8)}, to_target()), EINVAL);
  EXPECT_EQ(post_atomic(a.qp(), IBV_WR_ATOMIC_FETCH_AND_ADD, source.sge(0, 8), to_target(), 1), EINVAL);
  EXPECT_EQ(post_atomic(a.qp(), IBV_WR_ATOMIC_CMP_AND_SWP, source.sge(0, 8), to_target(), 1), EINVAL);
}

// An error of the sender stops its send queue only: the state SQE.
TEST_F(UnreliableConnection, LocalError_StopsTheSendQueue_UntilRts) {
  ASSERT_EQ(post_recv(a.qp(), {target.sge(0, 64)}, 50), 0);
  ibv_sge wrong = source.sge(0, 8);
  wrong.lkey ^= 1;
  ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {wrong}, {.wr_id = 1, .flags = 0}), 0);
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(a.state(), IBV_QPS_SQE);
  ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, 8)}, {.wr_id = 2}), 0);
  ibv_wc wc = poll_one(a.send_cq());
  EXPECT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(wc.wr_id, 2U);

  ASSERT_EQ(post(b.qp(), IBV_WR_SEND, {source.sge(0, 8)}, {.wr_id = 3}), 0);
  EXPECT_EQ(poll_one(b.send_cq()).status, IBV_WC_SUCCESS);
  wc = poll_one(a.recv_cq());
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << "the receive queue still works";
  EXPECT_EQ(wc.wr_id, 50U);

  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  attr.cur_qp_state = IBV_QPS_SQE;
  ASSERT_EQ(verbs().modify_qp(a.qp(), &attr, IBV_QP_STATE | IBV_QP_CUR_STATE), 0);
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 64)}, 4), 0);
  expect_next_arrives(4);
}

// A receive that the device cannot write fails its QP.
TEST_F(UnreliableConnection, ReceiveWithWrongKey_FailsTheReceiver) {
  ibv_sge wrong = target.sge(0, 64);
  wrong.lkey ^= 1;
  ASSERT_EQ(post_recv(b.qp(), {wrong}, 1), 0);
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 64)}, 2), 0);
  ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, 8)}, {.wr_id = 3}), 0);
  expect_sent(3, IBV_WC_SEND);
  const std::vector<ibv_wc> received = poll(b.recv_cq(), 2);
  ASSERT_EQ(received.size(), 2U);
  EXPECT_EQ(received[0].status, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(received[1].status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(b.state(), IBV_QPS_ERR);
  EXPECT_EQ(a.state(), IBV_QPS_RTS);
}

TEST_F(UnreliableConnection, ResetAndReconnected_Works) {
  a.to_reset();
  a.connect(b.address());  // the peer accepts any first packet
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 64)}, 4), 0);
  expect_next_arrives(4);
}

TEST_F(UnreliableConnection, ExtendedRequests_Arrive) {
  constexpr std::uint64_t kOperations = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
                                        IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
  Endpoint c(device, {.type = IBV_QPT_UC, .send_ops = kOperations});
  Endpoint d(device, {.type = IBV_QPT_UC});
  connect(c, d);
  source.fill(5);
  ASSERT_EQ(post_recv(d.qp(), {target.sge(64, 64)}, 1), 0);
  ibv_qp_ex* const extended = verbs().qp_to_qp_ex(c.qp());
  ibv_wr_start(extended);
  extended->wr_id = 8;
  extended->wr_flags = IBV_SEND_SIGNALED;
  ibv_wr_rdma_write(extended, target.mr->rkey, target.address());
  ibv_wr_set_sge(extended, source.mr->lkey, source.address(), 64);
  extended->wr_id = 9;
  ibv_wr_send_imm(extended, 3);
  ibv_wr_set_sge(extended, source.mr->lkey, source.address(), 64);
  ASSERT_EQ(ibv_wr_complete(extended), 0);
  const std::vector<ibv_wc> sent = poll(c.send_cq(), 2);
  ASSERT_EQ(sent.size(), 2U);
  EXPECT_EQ(sent[0].wr_id, 8U);
  EXPECT_EQ(sent[1].wr_id, 9U);
  EXPECT_EQ(poll_one(d.recv_cq()).imm_data, 3U);
  EXPECT_EQ(find_wrong_byte(target.bytes(0, 64), 5), std::nullopt);
  EXPECT_EQ(find_wrong_byte(target.bytes(64, 64), 5), std::nullopt);
}

TEST_F(UnreliableConnection, ExtendedReads_AreRefused) {
  ibv_qp_init_attr_ex attr{};
  attr.qp_type = IBV_QPT_UC;
  attr.send_cq = attr.recv_cq = a.send_cq();
  attr.cap = {1, 1, 1, 1, 0};
  attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  attr.pd = device.pd.get();
  attr.send_ops_flags = IBV_QP_EX_WITH_RDMA_READ;
  EXPECT_EQ(create_qp_ex(device.context.get(), attr), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
}

// Attributes of the acknowledgements do not belong to this QP type.
TEST_F(UnreliableConnection, AttributesOfReliableConnections_AreRefused) {
  Endpoint c(device, {.type = IBV_QPT_UC});
  c.to_init();
  ibv_qp_attr rtr = c.rtr_attr(b.address());
  EXPECT_EQ(verbs().modify_qp(c.qp(), &rtr, kRtrMask), EINVAL);
  EXPECT_EQ(verbs().modify_qp(c.qp(), &rtr, kUcRtrMask & ~IBV_QP_RQ_PSN), EINVAL);
  ASSERT_EQ(verbs().modify_qp(c.qp(), &rtr, kUcRtrMask), 0);
  ibv_qp_attr rts = c.rts_attr();
  EXPECT_EQ(verbs().modify_qp(c.qp(), &rts, kRtsMask), EINVAL);
  ASSERT_EQ(verbs().modify_qp(c.qp(), &rts, kUcRtsMask), 0);
}

}  // namespace
}  // namespace verbatim::test
