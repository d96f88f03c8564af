// The state machine of an RC QP: legal transitions, the required and optional attributes of each, and ibv_query_qp.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

class QpState : public testing::Test {
 protected:
  // Brings a new QP, connected to itself, to `state` by legal transitions.
  void bring_to(Endpoint& endpoint, ibv_qp_state state) {
    if (state == IBV_QPS_RESET) return;
    endpoint.to_init();
    if (state == IBV_QPS_INIT) return;
    if (state == IBV_QPS_ERR) return endpoint.to_error();
    endpoint.to_rtr(endpoint.address());
    if (state == IBV_QPS_RTR) return;
    endpoint.to_rts();
  }

  int modify(Endpoint& endpoint, ibv_qp_attr attr, int mask) { return verbs().modify_qp(endpoint.qp(), &attr, mask); }

  int to_state(Endpoint& endpoint, ibv_qp_state state) {
    switch (state) {
      case IBV_QPS_INIT:
        return modify(endpoint, endpoint.init_attr(), kInitMask);
      case IBV_QPS_RTR:
        return modify(endpoint, endpoint.rtr_attr(endpoint.address()), kRtrMask);
      case IBV_QPS_RTS:
        return modify(endpoint, endpoint.rts_attr(), kRtsMask);
      default: {
        ibv_qp_attr attr{};
        attr.qp_state = state;
        return modify(endpoint, attr, IBV_QP_STATE);
      }
    }
  }

  Device device = open_device();
};

TEST_F(QpState, NewQp_IsInReset) {
  const Endpoint endpoint(device);
  EXPECT_EQ(endpoint.state(), IBV_QPS_RESET);
  EXPECT_EQ(endpoint.qp()->state, IBV_QPS_RESET);
  EXPECT_EQ(endpoint.qp()->qp_type, IBV_QPT_RC);
  EXPECT_NE(endpoint.qp()->qp_num, 0U);
  EXPECT_LT(endpoint.qp()->qp_num, 1U << 24);
}

TEST_F(QpState, EveryPairOfStates_IsLegal_OrRefused) {
  constexpr ibv_qp_state kStates[] = {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_ERR};
  // Rows: from; columns: to. RESET to ERR follows Linux; the specification differs.
  constexpr bool kLegal[5][5] = {
      // RESET INIT   RTR    RTS    ERR
      {true, true, false, false, false},  // RESET
      {true, true, true, false, true},    // INIT
      {true, false, false, true, true},   // RTR
      {true, false, false, false, true},  // RTS; RTS to RTS is legal with other attributes, see below
      {true, false, false, false, true},  // ERR
  };
  for (std::size_t from = 0; from < 5; ++from) {
    for (std::size_t to = 0; to < 5; ++to) {
      Endpoint endpoint(device);
      bring_to(endpoint, kStates[from]);
      ASSERT_EQ(endpoint.state(), kStates[from]);
      const int expected = kLegal[from][to] ? 0 : EINVAL;
      EXPECT_EQ(to_state(endpoint, kStates[to]), expected) << kStates[from] << " to " << kStates[to];
      const ibv_qp_state after = kLegal[from][to] ? kStates[to] : kStates[from];
      EXPECT_EQ(endpoint.state(), after) << kStates[from] << " to " << kStates[to];
      EXPECT_EQ(endpoint.qp()->state, after) << kStates[from] << " to " << kStates[to];
    }
  }
}

TEST_F(QpState, RequiredAttributeMissing_IsRefused) {
  const struct {
    ibv_qp_state from;
    ibv_qp_state to;
    int mask;
  } steps[] = {{IBV_QPS_RESET, IBV_QPS_INIT, kInitMask},
               {IBV_QPS_INIT, IBV_QPS_RTR, kRtrMask},
               {IBV_QPS_RTR, IBV_QPS_RTS, kRtsMask}};
  for (const auto& step : steps) {
    Endpoint endpoint(device);
    bring_to(endpoint, step.from);
    ibv_qp_attr attr = endpoint.init_attr();
    if (step.to == IBV_QPS_RTR) attr = endpoint.rtr_attr(endpoint.address());
    if (step.to == IBV_QPS_RTS) attr = endpoint.rts_attr();
    for (int bit = 0; bit < 26; ++bit) {
      const int attribute = 1 << bit;
      if ((step.mask & attribute) == 0 || attribute == IBV_QP_STATE) continue;
      EXPECT_EQ(modify(endpoint, attr, step.mask & ~attribute), EINVAL) << "to " << step.to << " without bit " << bit;
      EXPECT_EQ(endpoint.state(), step.from);
    }
    EXPECT_EQ(modify(endpoint, attr, step.mask), 0);  // the refused calls changed nothing
  }
}

TEST_F(QpState, AttributeOfAnotherTransition_IsRefused) {
  Endpoint endpoint(device);
  EXPECT_EQ(modify(endpoint, endpoint.init_attr(), kInitMask | IBV_QP_DEST_QPN), EINVAL);
  EXPECT_EQ(modify(endpoint, endpoint.init_attr(), kInitMask | IBV_QP_QKEY), EINVAL);  // datagrams only
  endpoint.to_init();
  EXPECT_EQ(modify(endpoint, endpoint.rtr_attr(endpoint.address()), kRtrMask | IBV_QP_SQ_PSN), EINVAL);
  endpoint.to_rtr(endpoint.address());
  EXPECT_EQ(modify(endpoint, endpoint.rts_attr(), kRtsMask | IBV_QP_PATH_MTU), EINVAL);
  endpoint.to_rts();
  EXPECT_EQ(modify(endpoint, endpoint.rts_attr(), IBV_QP_STATE | IBV_QP_TIMEOUT), EINVAL);
}

TEST_F(QpState, ValueOutOfRange_IsRefused) {
  Endpoint endpoint(device);
  ibv_qp_attr attr = endpoint.init_attr();
  attr.port_num = 0;
  errno = 0;
  EXPECT_EQ(modify(endpoint, attr, kInitMask), EINVAL);
  EXPECT_EQ(errno, EINVAL);  // programs print errno
  attr.port_num = static_cast<std::uint8_t>(device.attr.phys_port_cnt + 1);
  EXPECT_EQ(modify(endpoint, attr, kInitMask), EINVAL);
  attr = endpoint.init_attr();
  attr.pkey_index = device.port.pkey_tbl_len;
  EXPECT_EQ(modify(endpoint, attr, kInitMask), EINVAL);
  endpoint.to_init();

  const auto refuses_rtr = [&](auto change) {
    ibv_qp_attr rtr = endpoint.rtr_attr(endpoint.address());
    change(rtr);
    return modify(endpoint, rtr, kRtrMask) == EINVAL;
  };
  EXPECT_TRUE(refuses_rtr([](ibv_qp_attr& rtr) { rtr.path_mtu = static_cast<ibv_mtu>(0); }));
  EXPECT_TRUE(refuses_rtr([](ibv_qp_attr& rtr) { rtr.path_mtu = static_cast<ibv_mtu>(IBV_MTU_4096 + 1); }));
  EXPECT_TRUE(refuses_rtr([](ibv_qp_attr& rtr) { rtr.max_dest_rd_atomic = 255; }));
  EXPECT_TRUE(refuses_rtr([](ibv_qp_attr& rtr) { rtr.ah_attr.port_num = 99; }));
  if (device.is_roce()) {
    EXPECT_TRUE(refuses_rtr([](ibv_qp_attr& rtr) { rtr.ah_attr.is_global = 0; }));
    EXPECT_TRUE(refuses_rtr(
        [this](ibv_qp_attr& rtr) { rtr.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(device.port.gid_tbl_len); }));
  }
  endpoint.to_rtr(endpoint.address());
  ibv_qp_attr rts = endpoint.rts_attr();
  rts.max_rd_atomic = 255;
  EXPECT_EQ(modify(endpoint, rts, kRtsMask), EINVAL);
  rts = endpoint.rts_attr();
  rts.retry_cnt = 8;  // three bits
  EXPECT_EQ(modify(endpoint, rts, kRtsMask), EINVAL);
  rts = endpoint.rts_attr();
  rts.rnr_retry = 8;
  EXPECT_EQ(modify(endpoint, rts, kRtsMask), EINVAL);
  rts = endpoint.rts_attr();
  rts.timeout = 32;  // five bits
  EXPECT_EQ(modify(endpoint, rts, kRtsMask), EINVAL);
  EXPECT_EQ(endpoint.state(), IBV_QPS_RTR);
}

TEST_F(QpState, InitToInit_ChangesValues) {
  Endpoint endpoint(device);
  endpoint.to_init();
  ibv_qp_attr attr{};
  attr.qp_access_flags = IBV_ACCESS_REMOTE_READ;
  EXPECT_EQ(modify(endpoint, attr, IBV_QP_ACCESS_FLAGS), 0);
  ibv_qp_attr read{};
  ibv_qp_init_attr init{};
  ASSERT_EQ(verbs().query_qp(endpoint.qp(), &read, IBV_QP_ACCESS_FLAGS | IBV_QP_STATE, &init), 0);
  EXPECT_EQ(read.qp_access_flags, unsigned{IBV_ACCESS_REMOTE_READ});
  EXPECT_EQ(read.qp_state, IBV_QPS_INIT);
}

TEST_F(QpState, RtsToRts_TakesOptionalAttributes) {
  Endpoint endpoint(device);
  bring_to(endpoint, IBV_QPS_RTS);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  attr.cur_qp_state = IBV_QPS_RTS;
  attr.min_rnr_timer = 20;
  attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  EXPECT_EQ(modify(endpoint, attr, IBV_QP_STATE | IBV_QP_CUR_STATE | IBV_QP_MIN_RNR_TIMER | IBV_QP_ACCESS_FLAGS), 0);
  ibv_qp_attr read{};
  ibv_qp_init_attr init{};
  ASSERT_EQ(verbs().query_qp(endpoint.qp(), &read, IBV_QP_MIN_RNR_TIMER | IBV_QP_ACCESS_FLAGS, &init), 0);
  EXPECT_EQ(read.min_rnr_timer, 20);
  EXPECT_EQ(read.qp_access_flags, unsigned{IBV_ACCESS_REMOTE_WRITE});
}

TEST_F(QpState, PostInSqd_WaitsUntilRts) {
  const Region region(device.pd.get(), 64);
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_SQD;
  ASSERT_EQ(modify(a, attr, IBV_QP_STATE), 0);
  EXPECT_EQ(a.state(), IBV_QPS_SQD);
  ASSERT_EQ(
      post(a.qp(), IBV_WR_RDMA_WRITE, {region.sge(0, 8)}, {.remote_addr = region.address(32), .rkey = region.mr->rkey}),
      0);
  EXPECT_TRUE(stays_empty(a.send_cq()));  // accepted, but not started
  EXPECT_EQ(region.buffer.untouched_outside(0, 0), "");
  ASSERT_EQ(post_recv(a.qp(), {region.sge(40, 8)}, 6), 0);  // the receive queue still works
  ASSERT_EQ(post(b.qp(), IBV_WR_SEND, {region.sge(0, 8)}), 0);
  EXPECT_EQ(poll_one(a.recv_cq()).wr_id, 6U);
  attr.qp_state = IBV_QPS_RTS;
  ASSERT_EQ(modify(a, attr, IBV_QP_STATE), 0);
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
}

TEST_F(QpState, SendQueueDrained_RaisesEvent) {
  Endpoint endpoint(device);
  bring_to(endpoint, IBV_QPS_RTS);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_SQD;
  attr.en_sqd_async_notify = 1;
  ASSERT_EQ(modify(endpoint, attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
  EXPECT_EQ(expect_async_event(device.context.get(), IBV_EVENT_SQ_DRAINED).qp, endpoint.qp());
}

TEST_F(QpState, Query_ReturnsWhatModifySet) {
  Endpoint endpoint(device,
                    {.send_wr = 17, .recv_wr = 23, .timers = {.timeout = 15, .retry_count = 3, .rnr_retry = 5}});
  endpoint.to_init();
  ibv_qp_attr rtr = endpoint.rtr_attr(endpoint.address());
  rtr.ah_attr.grh.flow_label = 0xabcde;
  rtr.ah_attr.grh.traffic_class = 106;
  rtr.ah_attr.grh.hop_limit = 63;
  rtr.ah_attr.sl = 3;
  ASSERT_EQ(modify(endpoint, rtr, kRtrMask), 0);
  endpoint.to_rts();
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  const int mask = kInitMask | kRtrMask | kRtsMask | IBV_QP_CAP;
  ASSERT_EQ(verbs().query_qp(endpoint.qp(), &attr, mask, &init), 0);
  const Address self = endpoint.address();
  EXPECT_EQ(attr.qp_state, IBV_QPS_RTS);
  EXPECT_EQ(attr.port_num, device.port_num);
  EXPECT_EQ(attr.pkey_index, 0);
  EXPECT_EQ(attr.qp_access_flags & static_cast<unsigned>(IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ),
            static_cast<unsigned>(IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ));
  EXPECT_EQ(attr.path_mtu, device.port.active_mtu);
  EXPECT_EQ(attr.dest_qp_num, self.qp_num);
  EXPECT_EQ(attr.max_dest_rd_atomic, 1);
  EXPECT_EQ(attr.min_rnr_timer, 12);
  EXPECT_EQ(attr.timeout, 15);
  EXPECT_EQ(attr.retry_cnt, 3);
  EXPECT_EQ(attr.rnr_retry, 5);
  EXPECT_EQ(attr.max_rd_atomic, 1);
  EXPECT_EQ(attr.cap.max_send_wr, endpoint.cap().max_send_wr);
  EXPECT_EQ(attr.cap.max_recv_wr, endpoint.cap().max_recv_wr);
  EXPECT_EQ(attr.ah_attr.port_num, device.port_num);
  EXPECT_EQ(attr.ah_attr.sl, 3);
  if (device.is_roce()) {
    EXPECT_EQ(attr.ah_attr.is_global, 1);
    EXPECT_EQ(std::memcmp(&attr.ah_attr.grh.dgid, &self.gid, sizeof(ibv_gid)), 0);
    EXPECT_EQ(attr.ah_attr.grh.sgid_index, device.gid_index);
    EXPECT_EQ(attr.ah_attr.grh.flow_label, 0xabcdeU);
    EXPECT_EQ(attr.ah_attr.grh.traffic_class, 106);
    EXPECT_EQ(attr.ah_attr.grh.hop_limit, 63);
  } else {
    EXPECT_EQ(attr.ah_attr.dlid, self.lid);
  }
  EXPECT_EQ(init.send_cq, endpoint.send_cq());
  EXPECT_EQ(init.recv_cq, endpoint.recv_cq());
  EXPECT_EQ(init.srq, nullptr);
  EXPECT_EQ(init.qp_type, IBV_QPT_RC);
  EXPECT_EQ(init.cap.max_send_sge, endpoint.cap().max_send_sge);
  EXPECT_EQ(init.cap.max_inline_data, endpoint.cap().max_inline_data);
}

TEST_F(QpState, Post_IsAccepted_OnlyInAllowedStates) {
  const Region region(device.pd.get(), 64);
  const struct {
    ibv_qp_state state;
    bool accepts_receives;
    bool accepts_sends;
  } rows[] = {{IBV_QPS_RESET, false, false},
              {IBV_QPS_INIT, true, false},
              {IBV_QPS_RTR, true, false},
              {IBV_QPS_RTS, true, true},
              {IBV_QPS_ERR, true, true}};
  for (const auto& row : rows) {
    Endpoint endpoint(device);
    bring_to(endpoint, row.state);
    EXPECT_EQ(post_recv(endpoint.qp(), {region.sge()}), row.accepts_receives ? 0 : EINVAL) << row.state;
    EXPECT_EQ(post(endpoint.qp(), IBV_WR_SEND, {region.sge(0, 8)}), row.accepts_sends ? 0 : EINVAL) << row.state;
    if (row.state == IBV_QPS_ERR) {  // a QP in the error state accepts requests and flushes them
      EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_WR_FLUSH_ERR);
      EXPECT_EQ(poll_one(endpoint.recv_cq()).status, IBV_WC_WR_FLUSH_ERR);
    }
  }
}

TEST_F(QpState, ReceiverInRtr_ReceivesMessage) {
  const Region region(device.pd.get(), 64);
  Endpoint sender(device);
  Endpoint receiver(device);
  sender.connect(receiver.address());
  receiver.to_init();
  ASSERT_EQ(post_recv(receiver.qp(), {region.sge(0, 32)}), 0);
  receiver.to_rtr(sender.address());
  ASSERT_EQ(post(sender.qp(), IBV_WR_SEND, {region.sge(32, 32)}), 0);
  EXPECT_EQ(poll_one(sender.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(poll_one(receiver.recv_cq()).status, IBV_WC_SUCCESS);
}

TEST_F(QpState, Reset_DiscardsOutstandingWork_AndQpIsReusable) {
  const Region region(device.pd.get(), 64);
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(post_recv(b.qp(), {region.sge(0, 32)}, i), 0);
  b.to_reset();
  a.to_reset();
  EXPECT_EQ(b.state(), IBV_QPS_RESET);
  EXPECT_TRUE(stays_empty(b.recv_cq()));  // neither flushed nor kept
  connect(a, b);
  ASSERT_EQ(post_recv(b.qp(), {region.sge(0, 32)}, 77), 0);
  ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {region.sge(32, 32)}), 0);
  EXPECT_EQ(poll_one(b.recv_cq()).wr_id, 77U);
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
}

TEST_F(QpState, FailedQp_IsReusable_AfterReset) {
  const Region region(device.pd.get(), 64);
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  a.to_error();
  b.to_error();
  a.to_reset();
  b.to_reset();
  connect(a, b);
  ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {region.sge(0, 32)},
                 {.remote_addr = region.address(32), .rkey = region.mr->rkey}),
            0);
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
}

TEST_F(QpState, Ece_IsNotSupported) {
  const Endpoint endpoint(device);
  ibv_ece ece{};
  EXPECT_EQ(verbs().query_ece(endpoint.qp(), &ece), EOPNOTSUPP);
  EXPECT_EQ(verbs().set_ece(endpoint.qp(), &ece), EOPNOTSUPP);
}

}  // namespace
}  // namespace verbatim::test
