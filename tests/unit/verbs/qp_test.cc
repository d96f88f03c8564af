#include "verbs/qp.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "support/fake_verbs.h"
#include "support/log_capture.h"

namespace verbatim {
namespace {

class QpTest : public testing::Test {
 protected:
  // Opens the device with the attributes that the test has set before.
  void open() {
    Result<std::unique_ptr<Device>> opened = Device::open(fake_.table, nullptr, &fake_device_.device, false);
    ASSERT_TRUE(opened);
    device_ = *std::move(opened);
    port_.device = device_.get();
    cq_.context = device_->context();
  }

  RcQp create(const QpCaps& caps = {}) {
    if (device_ == nullptr) open();
    Result<RcQp> qp = create_rc_qp(*device_, &cq_, &cq_, caps);
    EXPECT_TRUE(qp);
    return *std::move(qp);
  }

  static Port roce_port() {
    Port port;
    port.port_num = 2;
    port.link_layer = IBV_LINK_LAYER_ETHERNET;
    port.gid = {3, fake_gid("::ffff:10.0.0.1", 0).gid, RoceVersion::kV2};
    return port;
  }

  static Port infiniband_port(const char* gid = "fe80::1", unsigned gid_index = 0) {
    Port port;
    port.link_layer = IBV_LINK_LAYER_INFINIBAND;
    port.lid = 17;
    port.gid = {gid_index, fake_gid(gid, 0).gid, RoceVersion::kUnknown};
    return port;
  }

  ibv_qp_attr last() const { return fake_.modifications().back().attributes; }
  int last_mask() const { return fake_.modifications().back().mask; }

  FakeVerbs fake_;
  FakeDevice& fake_device_ = fake_.add_device("mlx5_0");
  std::unique_ptr<Device> device_;
  Port port_ = roce_port();
  ibv_cq cq_ = {};
};

const QpAddress kRoceRemote{
    .qp_num = 77, .lid = 0, .link_layer = IBV_LINK_LAYER_ETHERNET, .gid = fake_gid("::ffff:10.0.0.2", 0).gid};
QpAddress infiniband_remote(const char* gid) {
  return {.qp_num = 78, .lid = 18, .link_layer = IBV_LINK_LAYER_INFINIBAND, .gid = fake_gid(gid, 0).gid};
}
const QpAddress kInfinibandRemote = infiniband_remote("fe80::2");

TEST_F(QpTest, Create_UsesGivenCapsAndDestroys) {
  {
    const RcQp qp = create({.send_wr = 64, .recv_wr = 32, .inline_bytes = 48, .send_sge = 2, .recv_sge = 1});
    const ibv_qp_init_attr wanted = fake_.created_qps().back();
    EXPECT_EQ(wanted.qp_type, IBV_QPT_RC);
    EXPECT_EQ(wanted.send_cq, &cq_);
    EXPECT_EQ(wanted.cap.max_send_wr, 64U);
    EXPECT_EQ(wanted.cap.max_recv_wr, 32U);
    EXPECT_EQ(wanted.cap.max_send_sge, 2U);
    EXPECT_EQ(wanted.cap.max_recv_sge, 1U);
    EXPECT_EQ(wanted.sq_sig_all, 0);
    EXPECT_EQ(qp.inline_bytes, 48U);  // as requested, although the device gave 64
    EXPECT_EQ(fake_.live("qp"), 1);
  }
  EXPECT_EQ(fake_.live("qp"), 0);
}

// A QP that could not be destroyed still counts.
TEST_F(QpTest, LiveQps_AreCounted) {
  RcQp one = create();
  RcQp moved = create();
  RcQp other = std::move(moved);
  EXPECT_EQ(device_->live_qps(), 2U);
  one.qp.reset();
  EXPECT_EQ(device_->live_qps(), 1U);
  fake_.failures["create_qp"] = ENOMEM;
  EXPECT_FALSE(create_rc_qp(*device_, &cq_, &cq_, {}));
  EXPECT_EQ(device_->live_qps(), 1U);
  fake_.failures = {{"destroy_qp", EBUSY}};
  ibv_qp* const left = other.qp.get();
  const LogCapture log;
  other.qp.reset();
  EXPECT_EQ(log.only_warning(), "cannot destroy a queue pair of mlx5_0: Device or resource busy. The object is leaked");
  EXPECT_EQ(device_->live_qps(), 1U);
  fake_.failures.clear();
  EXPECT_EQ(fake_.table.destroy_qp(left), 0);
}

TEST_F(QpTest, DepthsBeyondDevice_AreReduced) {
  create({.send_wr = 5000, .recv_wr = 5000, .send_sge = 30});
  EXPECT_EQ(fake_.created_qps().back().cap.max_send_wr, 1024U);
  EXPECT_EQ(fake_.created_qps().back().cap.max_recv_wr, 1024U);
  EXPECT_EQ(fake_.created_qps().back().cap.max_send_sge, 4U);
}

TEST_F(QpTest, InlineBeyondDevice_IsHalvedUntilAccepted) {
  fake_device_.max_inline = 60;
  EXPECT_EQ(create({.inline_bytes = 200}).inline_bytes, 60U);  // 200 and 100 fail; 50 succeeds, and the device gives 60
  EXPECT_EQ(fake_.created_qps().back().cap.max_inline_data, 50U);
  fake_device_.max_inline = 0;
  EXPECT_EQ(create({.inline_bytes = 200}).inline_bytes, 0U);
}

TEST_F(QpTest, CreateQpFails_GivesErrno) {
  open();
  fake_.failures["create_qp"] = ENOMEM;
  const Result<RcQp> qp = create_rc_qp(*device_, &cq_, &cq_, {.inline_bytes = 64});
  ASSERT_FALSE(qp);
  EXPECT_EQ(qp.error().sys_errno, ENOMEM);
  EXPECT_STREQ(qp.error().operation, "ibv_create_qp");
}

TEST_F(QpTest, ToInit_SetsAttributes) {
  const RcQp qp = create();
  ASSERT_TRUE(to_init(qp.qp.get(), port_, 5));
  EXPECT_EQ(last().qp_state, IBV_QPS_INIT);
  EXPECT_EQ(last().pkey_index, 5);
  EXPECT_EQ(last().port_num, 2);
  EXPECT_EQ(last().qp_access_flags, unsigned{IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                                             IBV_ACCESS_REMOTE_ATOMIC});
  EXPECT_EQ(last_mask(), IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

TEST_F(QpTest, DeviceWithoutAtomics_GetsNoAtomicAccess) {
  fake_device_.attributes.atomic_cap = IBV_ATOMIC_NONE;
  const RcQp qp = create();
  ASSERT_TRUE(to_init(qp.qp.get(), port_, 0));
  EXPECT_EQ(last().qp_access_flags & IBV_ACCESS_REMOTE_ATOMIC, 0U);
}

TEST_F(QpTest, ToRtrOnRoce_SetsGlobalAddress) {
  const RcQp qp = create();
  ASSERT_TRUE(to_rtr(qp.qp.get(), port_, kRoceRemote, {.mtu = IBV_MTU_4096, .traffic_class = 106, .service_level = 3}));
  const ibv_qp_attr set = last();
  EXPECT_EQ(set.qp_state, IBV_QPS_RTR);
  EXPECT_EQ(set.path_mtu, IBV_MTU_4096);
  EXPECT_EQ(set.dest_qp_num, 77U);
  EXPECT_EQ(set.rq_psn, 0U);
  EXPECT_EQ(set.max_dest_rd_atomic, 16);
  EXPECT_EQ(set.min_rnr_timer, 12);
  EXPECT_EQ(set.ah_attr.is_global, 1);
  EXPECT_EQ(set.ah_attr.port_num, 2);
  EXPECT_EQ(set.ah_attr.sl, 3);
  EXPECT_EQ(set.ah_attr.grh.sgid_index, 3);
  EXPECT_EQ(set.ah_attr.grh.traffic_class, 106);
  EXPECT_EQ(set.ah_attr.grh.hop_limit, 255);
  EXPECT_EQ(to_string(set.ah_attr.grh.dgid), "::ffff:10.0.0.2");
  EXPECT_EQ(last_mask(), IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

TEST_F(QpTest, ToRtrOnInfiniband_UsesLid) {
  port_ = infiniband_port();
  const RcQp qp = create();
  ASSERT_TRUE(to_rtr(qp.qp.get(), port_, kInfinibandRemote, {.service_level = 2}));
  EXPECT_EQ(last().ah_attr.is_global, 0);
  EXPECT_EQ(last().ah_attr.dlid, 18);
  EXPECT_EQ(last().ah_attr.sl, 2);
}

TEST_F(QpTest, ToRtrAcrossSubnets_UsesGid) {
  port_ = infiniband_port();
  const RcQp qp = create();
  const QpAddress remote = infiniband_remote("fec0:0:0:7::2");
  ASSERT_TRUE(to_rtr(qp.qp.get(), port_, remote, {}));
  EXPECT_EQ(last().ah_attr.is_global, 1);
  EXPECT_EQ(to_string(last().ah_attr.grh.dgid), "fec0:0:0:7::2");
}

// The FLID is in the third group of the GID; the routers forward by it.
TEST_F(QpTest, ToRtrAcrossSubnetsWithFlid_UsesFlidAsLid) {
  port_ = infiniband_port("fec0:0:8001:6::1", 1);
  const RcQp qp = create();
  const QpAddress remote = infiniband_remote("fec0:0:8002:7::2");
  ASSERT_TRUE(to_rtr(qp.qp.get(), port_, remote, {}));
  EXPECT_EQ(last().ah_attr.is_global, 1);
  EXPECT_EQ(last().ah_attr.dlid, 0x8002);
  EXPECT_EQ(last().ah_attr.grh.sgid_index, 1);
  EXPECT_EQ(to_string(last().ah_attr.grh.dgid), "fec0:0:8002:7::2");
}

// As in NCCL, only the low 16 bits of the prefix name the subnet.
TEST_F(QpTest, ToRtrWithinSubnetWithFlid_UsesLid) {
  port_ = infiniband_port("fec0:0:8001:7::1", 1);
  const RcQp qp = create();
  const QpAddress remote = infiniband_remote("fec0:0:8002:7::2");
  ASSERT_TRUE(to_rtr(qp.qp.get(), port_, remote, {}));
  EXPECT_EQ(last().ah_attr.is_global, 0);
  EXPECT_EQ(last().ah_attr.dlid, 18);
}

TEST_F(QpTest, ToRtrWhereEitherEndDemandsGrh_HasLidAndGrh) {
  port_ = infiniband_port();
  const RcQp qp = create();
  for (const bool local : {false, true}) {
    port_.grh_required = local;
    QpAddress remote = kInfinibandRemote;
    remote.grh_required = !local;
    ASSERT_TRUE(to_rtr(qp.qp.get(), port_, remote, {}));
    EXPECT_EQ(last().ah_attr.is_global, 1);
    EXPECT_EQ(last().ah_attr.dlid, 18);
    EXPECT_EQ(to_string(last().ah_attr.grh.dgid), "fe80::2");
  }
}

// A flush QP is connected to itself.
TEST_F(QpTest, AddressOfQp_SaysWhetherPortDemandsGrh) {
  port_ = infiniband_port();
  port_.grh_required = true;
  const RcQp qp = create();
  EXPECT_TRUE(qp_address(port_, qp.qp.get()).grh_required);
}

TEST_F(QpTest, ToRtrBetweenLinkLayers_IsRejected) {
  const RcQp qp = create();
  const Status status = to_rtr(qp.qp.get(), port_, kInfinibandRemote, {});
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().kind, ErrorKind::kRemote);
  EXPECT_TRUE(fake_.modifications().empty());
}

TEST_F(QpTest, ToRtrBetweenGidTypes_IsRejected) {
  const RcQp qp = create();
  port_.gid.version = RoceVersion::kV2;
  QpAddress remote = kRoceRemote;
  const auto rejected = [&]() -> std::string {
    const Status status = to_rtr(qp.qp.get(), port_, remote, {});
    if (status) return "";
    EXPECT_EQ(status.error().kind, ErrorKind::kRemote);
    EXPECT_EQ(status.error().step, SetupStep::kMatchGids);
    return status.error().operation;
  };
  EXPECT_EQ(rejected(), "") << "the peer's version is not known";
  remote.roce_version = RoceVersion::kV2;
  EXPECT_EQ(rejected(), "");
  EXPECT_EQ(fake_.modifications().size(), 2U);
  remote.roce_version = RoceVersion::kV1;
  EXPECT_EQ(rejected(), "one end uses RoCE v1, the other RoCE v2");
  remote.roce_version = RoceVersion::kV2;
  remote.gid = fake_gid("fe80::2", 0).gid;
  EXPECT_EQ(rejected(), "one end has an IPv4 GID, the other an IPv6 GID");
  port_.gid.gid = fake_gid("2001:db8::1", 0).gid;
  EXPECT_EQ(rejected(), "");
  port_.gid.version = remote.roce_version = RoceVersion::kV1;
  EXPECT_EQ(rejected(), "");
  EXPECT_EQ(fake_.modifications().size(), 4U);
}

TEST_F(QpTest, ToRtrFails_GivesErrno) {
  const RcQp qp = create();
  for (const int code : {ETIMEDOUT, ENETUNREACH, ENODEV, EINVAL}) {
    fake_.failures["modify_qp"] = code;
    const Status status = to_rtr(qp.qp.get(), port_, kRoceRemote, {});
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().sys_errno, code);
    EXPECT_STREQ(status.error().operation, "ibv_modify_qp to RTR");
  }
}

TEST_F(QpTest, ToRts_SetsAttributes) {
  const RcQp qp = create();
  ASSERT_TRUE(to_rts(qp.qp.get(), port_, 14, 6, 16));
  EXPECT_EQ(last().qp_state, IBV_QPS_RTS);
  EXPECT_EQ(last().timeout, 14);
  EXPECT_EQ(last().retry_cnt, 6);
  EXPECT_EQ(last().rnr_retry, 7);
  EXPECT_EQ(last().sq_psn, 0U);
  EXPECT_EQ(last().max_rd_atomic, 16);
  EXPECT_EQ(last_mask(), IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                             IBV_QP_MAX_QP_RD_ATOMIC);
}

TEST_F(QpTest, OutstandingReadsBeyondDevice_AreReduced) {
  fake_device_.attributes.max_qp_rd_atom = 4;
  fake_device_.attributes.max_qp_init_rd_atom = 128;
  const RcQp qp = create();
  ASSERT_TRUE(to_rtr(qp.qp.get(), port_, kRoceRemote, {}));
  EXPECT_EQ(last().max_dest_rd_atomic, 4);
  ASSERT_TRUE(to_rts(qp.qp.get(), port_, 14, 7, 16));
  EXPECT_EQ(last().max_rd_atomic, 16);
}

TEST_F(QpTest, ToError_SetsState) {
  const RcQp qp = create();
  ASSERT_TRUE(to_error(qp.qp.get(), *device_));
  EXPECT_EQ(last().qp_state, IBV_QPS_ERR);
  EXPECT_EQ(last_mask(), IBV_QP_STATE);
}

TEST_F(QpTest, Address_HasQpNumberLidAndGid) {
  port_ = infiniband_port();
  const RcQp qp = create();
  const QpAddress address = qp_address(port_, qp.qp.get());
  EXPECT_EQ(address.qp_num, qp.qp->qp_num);
  EXPECT_EQ(address.lid, 17);
  EXPECT_EQ(address.link_layer, IBV_LINK_LAYER_INFINIBAND);
  EXPECT_EQ(to_string(address.gid), "fe80::1");
}

TEST_F(QpTest, EceSupported_IsQueriedAndSet) {
  fake_device_.ece_errno = 0;
  const RcQp qp = create();
  const Result<std::optional<ibv_ece>> ece = query_ece(qp.qp.get(), *device_);
  ASSERT_TRUE(ece && ece->has_value());
  EXPECT_EQ((*ece)->vendor_id, 0x15b3U);
  const Result<bool> set = set_ece(qp.qp.get(), *device_, **ece);
  ASSERT_TRUE(set);
  EXPECT_TRUE(*set);
  ASSERT_TRUE(fake_.ece_set);
  EXPECT_EQ(fake_.ece_set->options, 7U);
}

TEST_F(QpTest, EceUnsupported_IsNoError) {
  const RcQp qp = create();
  for (const int code : {EOPNOTSUPP, EPROTONOSUPPORT, ENOSYS}) {
    fake_device_.ece_errno = code;
    const Result<std::optional<ibv_ece>> ece = query_ece(qp.qp.get(), *device_);
    ASSERT_TRUE(ece);
    EXPECT_FALSE(ece->has_value());
    const Result<bool> set = set_ece(qp.qp.get(), *device_, {});
    ASSERT_TRUE(set);
    EXPECT_FALSE(*set);
  }
  fake_device_.ece_errno = EIO;
  EXPECT_EQ(query_ece(qp.qp.get(), *device_).error().sys_errno, EIO);
  EXPECT_EQ(set_ece(qp.qp.get(), *device_, {}).error().sys_errno, EIO);
}

TEST_F(QpTest, LibraryWithoutEce_IsNoError) {
  fake_.table.query_ece = nullptr;
  fake_.table.set_ece = nullptr;
  const RcQp qp = create();
  EXPECT_FALSE(query_ece(qp.qp.get(), *device_)->has_value());
  EXPECT_FALSE(*set_ece(qp.qp.get(), *device_, {}));
}

}  // namespace
}  // namespace verbatim
