// The ibv_wr_* interface: every operation of a reliable connection, and batches, of which either all or no requests are
// posted.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

constexpr std::uint64_t kAllOps = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND |
                                  IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
                                  IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
constexpr std::uint64_t kExtendedSeed = 0x0E;

class ExtendedQp : public testing::Test {
 protected:
  ExtendedQp() {
    target.fill(kExtendedSeed + 1);
    source.fill(kExtendedSeed);
    connect(near, far);
    wr = verbs().qp_to_qp_ex(near.qp());
  }

  void begin(std::uint64_t wr_id, unsigned flags = IBV_SEND_SIGNALED) {
    wr->wr_id = wr_id;
    wr->wr_flags = flags;
  }

  ibv_wc completed(ibv_wc_opcode opcode, std::uint64_t wr_id) {
    const ibv_wc wc = poll_one(near.send_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.opcode, opcode);
    EXPECT_EQ(wc.wr_id, wr_id);
    return wc;
  }

  static EndpointOptions options() {
    EndpointOptions options;
    options.send_ops = kAllOps;
    options.access = kAllAccess | IBV_ACCESS_REMOTE_ATOMIC;
    options.send_wr = 8;
    return options;
  }

  Device device = open_device();
  Region source{device.pd.get(), 4096};
  Region target{device.pd.get(), 4096, 0, kAllAccess | IBV_ACCESS_REMOTE_ATOMIC};
  Endpoint near{device, options()};
  Endpoint far{device, options()};
  ibv_qp_ex* wr = nullptr;
};

TEST_F(ExtendedQp, Handle_IsTheSameObject) {
  ASSERT_NE(wr, nullptr);
  EXPECT_EQ(&wr->qp_base, near.qp());
  EXPECT_EQ(verbs().qp_to_qp_ex(Endpoint(device).qp()), nullptr) << "created without send operations";
}

TEST_F(ExtendedQp, RdmaWrites_MoveData) {
  ASSERT_EQ(post_recv(far.qp(), {}), 0);
  ibv_wr_start(wr);
  begin(1);
  ibv_wr_rdma_write(wr, target.mr->rkey, target.address());
  ibv_wr_set_sge(wr, source.mr->lkey, source.address(), 1000);
  begin(2);
  ibv_wr_rdma_write_imm(wr, target.mr->rkey, target.address(1000), 77);
  const ibv_sge pieces[] = {source.sge(1000, 500), source.sge(1500, 10)};
  ibv_wr_set_sge_list(wr, 2, pieces);
  ASSERT_EQ(ibv_wr_complete(wr), 0);
  completed(IBV_WC_RDMA_WRITE, 1);
  completed(IBV_WC_RDMA_WRITE, 2);
  const ibv_wc received = poll_one(far.recv_cq());
  EXPECT_EQ(received.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_EQ(received.imm_data, 77U);
  EXPECT_EQ(received.byte_len, 510U);
  EXPECT_EQ(find_wrong_byte(target.bytes(0, 1510), kExtendedSeed), std::nullopt);
  EXPECT_EQ(find_wrong_byte(target.bytes(1510, 2000), kExtendedSeed + 1, 1510), std::nullopt);
}

TEST_F(ExtendedQp, Sends_MoveData) {
  ASSERT_EQ(post_recv(far.qp(), {target.sge(0, 100)}, 11), 0);
  ASSERT_EQ(post_recv(far.qp(), {target.sge(100, 100)}, 12), 0);
  ibv_wr_start(wr);
  begin(1);
  ibv_wr_send(wr);
  ibv_wr_set_sge(wr, source.mr->lkey, source.address(), 100);
  begin(2);
  ibv_wr_send_imm(wr, 5);
  ibv_wr_set_sge(wr, source.mr->lkey, source.address(100), 50);
  ASSERT_EQ(ibv_wr_complete(wr), 0);
  completed(IBV_WC_SEND, 1);
  completed(IBV_WC_SEND, 2);
  const std::vector<ibv_wc> received = poll(far.recv_cq(), 2);
  ASSERT_EQ(received.size(), 2U);
  EXPECT_EQ(received[0].wc_flags, 0U);
  EXPECT_EQ(received[1].wc_flags, unsigned{IBV_WC_WITH_IMM});
  EXPECT_EQ(received[1].imm_data, 5U);
  EXPECT_EQ(received[1].byte_len, 50U);
  EXPECT_EQ(find_wrong_byte(target.bytes(0, 150), kExtendedSeed), std::nullopt);
}

TEST_F(ExtendedQp, ReadsAndAtomics_ReturnValues) {
  std::uint64_t word = 40;
  std::memcpy(target.buffer.data(), &word, sizeof word);
  ibv_wr_start(wr);
  begin(1);
  ibv_wr_atomic_fetch_add(wr, target.mr->rkey, target.address(), 2);
  ibv_wr_set_sge(wr, source.mr->lkey, source.address(), 8);
  begin(2);
  ibv_wr_atomic_cmp_swp(wr, target.mr->rkey, target.address(), 42, 7);
  ibv_wr_set_sge(wr, source.mr->lkey, source.address(8), 8);
  begin(3);
  ibv_wr_rdma_read(wr, target.mr->rkey, target.address());
  ibv_wr_set_sge(wr, source.mr->lkey, source.address(16), 8);
  ASSERT_EQ(ibv_wr_complete(wr), 0);
  completed(IBV_WC_FETCH_ADD, 1);
  completed(IBV_WC_COMP_SWAP, 2);
  completed(IBV_WC_RDMA_READ, 3);
  std::uint64_t results[3];
  std::memcpy(results, source.buffer.data(), sizeof results);
  EXPECT_EQ(results[0], 40U);
  EXPECT_EQ(results[1], 42U);
  EXPECT_EQ(results[2], 7U);
}

TEST_F(ExtendedQp, InlineData_IsCopied_AtTheCall) {
  char text[] = "inline data";
  char more[] = "and more";
  ibv_wr_start(wr);
  begin(1);
  ibv_wr_rdma_write(wr, target.mr->rkey, target.address());
  ibv_wr_set_inline_data(wr, text, sizeof text);
  const ibv_data_buf pieces[] = {{more, 4}, {text, 6}};
  begin(2);
  ibv_wr_rdma_write(wr, target.mr->rkey, target.address(100));
  ibv_wr_set_inline_data_list(wr, 2, pieces);
  std::memset(text, '-', sizeof text);
  std::memset(more, '-', sizeof more);
  ASSERT_EQ(ibv_wr_complete(wr), 0);
  completed(IBV_WC_RDMA_WRITE, 1);
  completed(IBV_WC_RDMA_WRITE, 2);
  EXPECT_EQ(std::memcmp(target.buffer.data(), "inline data", 12), 0);
  EXPECT_EQ(std::memcmp(target.buffer.data() + 100, "and inline", 10), 0);
}

TEST_F(ExtendedQp, BeforeCompleteOrAfterAbort_NothingIsSent) {
  ibv_wr_start(wr);
  begin(1);
  ibv_wr_rdma_write(wr, target.mr->rkey, target.address());
  ibv_wr_set_sge(wr, source.mr->lkey, source.address(), 100);
  EXPECT_EQ(find_wrong_byte(target.bytes(0, 100), kExtendedSeed + 1), std::nullopt);
  ibv_wr_abort(wr);
  EXPECT_TRUE(stays_empty(near.send_cq()));
  EXPECT_EQ(find_wrong_byte(target.bytes(0, 100), kExtendedSeed + 1), std::nullopt);
  // After the abort, ibv_post_send can be used on the same QP.
  ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, 100)},
                 {.wr_id = 2, .remote_addr = target.address(), .rkey = target.mr->rkey}),
            0);
  completed(IBV_WC_RDMA_WRITE, 2);
}

TEST_F(ExtendedQp, BatchLargerThanQueue_IsNotPosted) {
  const std::uint32_t depth = near.cap().max_send_wr;
  for (const std::uint32_t count : {depth + 1, depth}) {
    ibv_wr_start(wr);
    for (std::uint32_t i = 0; i < count; ++i) {
      begin(i);
      ibv_wr_rdma_write(wr, target.mr->rkey, target.address());
      ibv_wr_set_sge(wr, source.mr->lkey, source.address(), 8);
    }
    EXPECT_EQ(ibv_wr_complete(wr), count > depth ? ENOMEM : 0);
    if (count > depth) {
      EXPECT_TRUE(stays_empty(near.send_cq()));
    } else {
      EXPECT_EQ(poll(near.send_cq(), depth).size(), depth);
    }
  }
}

TEST_F(ExtendedQp, InvalidCall_FailsTheWholeBatch) {
  const auto fails_with = [&](int error, auto build) {
    ibv_wr_start(wr);
    begin(1);
    ibv_wr_rdma_write(wr, target.mr->rkey, target.address());
    ibv_wr_set_sge(wr, source.mr->lkey, source.address(), 8);
    build();
    EXPECT_EQ(ibv_wr_complete(wr), error);
    EXPECT_TRUE(stays_empty(near.send_cq(), 1ms));
  };
  std::vector<ibv_sge> sges(near.cap().max_send_sge + 1, source.sge(0, 1));
  fails_with(EINVAL, [&] { ibv_wr_set_sge_list(wr, sges.size(), sges.data()); });
  fails_with(EINVAL, [&] { ibv_wr_set_inline_data(wr, source.buffer.data(), near.cap().max_inline_data + 1); });
  fails_with(EINVAL, [&] {
    ibv_wr_rdma_read(wr, target.mr->rkey, target.address());
    ibv_wr_set_inline_data(wr, source.buffer.data(), 1);
  });
  fails_with(EOPNOTSUPP, [&] { ibv_wr_local_inv(wr, target.mr->rkey); });
  EXPECT_EQ(near.state(), IBV_QPS_RTS);
}

TEST_F(ExtendedQp, SetterWithoutRequest_FailsTheBatch) {
  ibv_wr_start(wr);
  ibv_wr_set_sge(wr, source.mr->lkey, source.address(), 8);
  EXPECT_EQ(ibv_wr_complete(wr), EINVAL);
}

TEST_F(ExtendedQp, OperationNotRequested_IsRefused) {
  EndpointOptions few = options();
  few.send_ops = IBV_QP_EX_WITH_SEND;
  Endpoint endpoint(device, few);
  connect(endpoint, endpoint);
  ibv_qp_ex* const extended = verbs().qp_to_qp_ex(endpoint.qp());
  ASSERT_NE(extended, nullptr);
  ibv_wr_start(extended);
  ibv_wr_rdma_write(extended, target.mr->rkey, target.address());
  EXPECT_EQ(ibv_wr_complete(extended), EOPNOTSUPP);
}

TEST_F(ExtendedQp, PostInInit_IsRefused) {
  Endpoint endpoint(device, options());
  endpoint.to_init();
  ibv_qp_ex* const extended = verbs().qp_to_qp_ex(endpoint.qp());
  ibv_wr_start(extended);
  ibv_wr_send(extended);
  EXPECT_EQ(ibv_wr_complete(extended), EINVAL);
}

TEST_F(ExtendedQp, UnsupportedAttribute_IsRefused) {
  const auto create_error = [&](auto change) {
    ibv_qp_init_attr_ex attr{};
    attr.send_cq = near.send_cq();
    attr.recv_cq = near.recv_cq();
    attr.cap = {1, 1, 1, 1, 0};
    attr.qp_type = IBV_QPT_RC;
    attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    attr.pd = device.pd.get();
    attr.send_ops_flags = IBV_QP_EX_WITH_SEND;
    change(attr);
    errno = 0;
    const Qp qp(create_qp_ex(device.context.get(), attr));
    return qp ? 0 : errno;
  };
  using Attr = ibv_qp_init_attr_ex;
  EXPECT_EQ(create_error([](Attr&) {}), 0);
  EXPECT_EQ(create_error([](Attr& a) { a.send_ops_flags |= IBV_QP_EX_WITH_BIND_MW; }), EOPNOTSUPP);
  EXPECT_EQ(create_error([](Attr& a) { a.send_ops_flags |= IBV_QP_EX_WITH_TSO; }), EOPNOTSUPP);
  EXPECT_EQ(create_error([](Attr& a) { a.comp_mask |= IBV_QP_INIT_ATTR_XRCD; }), EOPNOTSUPP);
  EXPECT_EQ(create_error([](Attr& a) { a.comp_mask |= IBV_QP_INIT_ATTR_RX_HASH; }), EOPNOTSUPP);
  EXPECT_EQ(create_error([](Attr& a) {
              a.qp_type = IBV_QPT_UD;
              a.send_ops_flags |= IBV_QP_EX_WITH_RDMA_WRITE;
            }),
            EOPNOTSUPP);
  EXPECT_EQ(create_error([](Attr& a) { a.qp_type = IBV_QPT_XRC_SEND; }), EOPNOTSUPP);
  EXPECT_EQ(create_error([](Attr& a) {
              a.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
              a.create_flags = IBV_QP_CREATE_SCATTER_FCS;
            }),
            EOPNOTSUPP);
  EXPECT_EQ(create_error([](Attr& a) { a.comp_mask &= ~std::uint32_t{IBV_QP_INIT_ATTR_PD}; }), EINVAL);
}

}  // namespace
}  // namespace verbatim::test
