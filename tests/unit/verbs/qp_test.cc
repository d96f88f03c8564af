#include "verbs/qp.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "support/log_lines.h"
#include "unit/support/fake_verbs.h"
#include "unit/support/log_capture.h"

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
    Result<RcQp> qp = make_qp(port_, &cq_, caps, config_);
    EXPECT_TRUE(qp);
    return *std::move(qp);
  }

  // What the two modifications of a connected QP have set.
  struct Moved {
    ibv_qp_attr rtr;
    ibv_qp_attr rts;
    int rtr_mask;
  };
  Moved connect(const QpAddress& remote, const QpPath& path = {}, std::uint8_t peer_reads = 16) {
    const RcQp qp = create();
    static_cast<void>(modified());
    const Result<ConnectedQp> connected =
        connect_qp(qp.qp.get(), port_, {.remote = remote, .path = path, .peer_reads = peer_reads}, config_);
    EXPECT_TRUE(connected);
    const std::vector<FakeVerbs::Modification> made = modified();
    if (made.size() != 2) throw std::runtime_error("not connected");
    const Moved moved{made[0].attributes, made[1].attributes, made[0].mask};
    EXPECT_EQ(moved.rtr.qp_state, IBV_QPS_RTR);
    EXPECT_EQ(moved.rts.qp_state, IBV_QPS_RTS);
    return moved;
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

  // The modifications of QPs since the last call.
  std::vector<FakeVerbs::Modification> modified() {
    const std::vector<FakeVerbs::Modification> all = fake_.modifications();
    const std::size_t before = std::exchange(seen_, all.size());
    return {all.begin() + static_cast<std::ptrdiff_t>(before), all.end()};
  }
  ibv_qp_attr last() const { return fake_.modifications().back().attributes; }
  int last_mask() const { return fake_.modifications().back().mask; }

  FakeVerbs fake_;
  FakeDevice& fake_device_ = fake_.add_device("mlx5_0");
  std::unique_ptr<Device> device_;
  Port port_ = roce_port();
  Config config_;
  std::size_t seen_ = 0;
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
    const RcQp qp = create({.send_wr = 64, .recv_wr = 32, .inline_bytes = 48});
    const ibv_qp_init_attr wanted = fake_.created_qps().back();
    EXPECT_EQ(wanted.qp_type, IBV_QPT_RC);
    EXPECT_EQ(wanted.send_cq, &cq_);
    EXPECT_EQ(wanted.cap.max_send_wr, 64U);
    EXPECT_EQ(wanted.cap.max_recv_wr, 32U);
    EXPECT_EQ(wanted.recv_cq, &cq_);
    EXPECT_EQ(wanted.cap.max_send_sge, 1U);
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
  EXPECT_FALSE(make_qp(port_, &cq_, {}, config_));
  EXPECT_EQ(device_->live_qps(), 1U);
  fake_.failures = {{"destroy_qp", EBUSY}};
  ibv_qp* const left = other.qp.get();
  const LogCapture log;
  other.qp.reset();
  test::expect_log_lines(log.warnings());
  EXPECT_EQ(device_->live_qps(), 1U);
  fake_.failures.clear();
  EXPECT_EQ(fake_.table.destroy_qp(left), 0);
}

TEST_F(QpTest, DepthsBeyondDevice_AreReduced) {
  create({.send_wr = 5000, .recv_wr = 5000});
  EXPECT_EQ(fake_.created_qps().back().cap.max_send_wr, 1024U);
  EXPECT_EQ(fake_.created_qps().back().cap.max_recv_wr, 1024U);
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
  const Result<RcQp> qp = make_qp(port_, &cq_, {.inline_bytes = 64}, config_);
  ASSERT_FALSE(qp);
  EXPECT_EQ(qp.error().sys_errno, ENOMEM);
  EXPECT_STREQ(qp.error().operation, "ibv_create_qp");
}

TEST_F(QpTest, MadeQp_IsInInit) {
  config_.pkey_index = 5;
  const RcQp qp = create();
  EXPECT_EQ(last().qp_state, IBV_QPS_INIT);
  EXPECT_EQ(last().pkey_index, 5);
  EXPECT_EQ(last().port_num, 2);
  EXPECT_EQ(last().qp_access_flags, unsigned{IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                                             IBV_ACCESS_REMOTE_ATOMIC});
  EXPECT_EQ(last_mask(), IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

TEST_F(QpTest, QpThatCannotMoveToInit_IsDestroyed) {
  open();
  fake_.failures["modify_qp"] = EINVAL;
  const Result<RcQp> qp = make_qp(port_, &cq_, {}, config_);
  ASSERT_FALSE(qp);
  EXPECT_STREQ(qp.error().operation, "ibv_modify_qp to INIT");
  EXPECT_EQ(fake_.live("qp"), 0);
}

TEST_F(QpTest, QpMadeAgain_GoesThroughReset) {
  const RcQp qp = create();
  static_cast<void>(modified());
  ASSERT_TRUE(make_again(qp.qp.get(), port_, config_));
  const std::vector<FakeVerbs::Modification> made = modified();
  ASSERT_EQ(made.size(), 2U);
  EXPECT_EQ(made[0].attributes.qp_state, IBV_QPS_RESET);
  EXPECT_EQ(made[1].attributes.qp_state, IBV_QPS_INIT);
  fake_.failures["modify_qp"] = EIO;
  EXPECT_STREQ(make_again(qp.qp.get(), port_, config_).error().operation, "ibv_modify_qp to RESET");
}

TEST_F(QpTest, DeviceWithoutAtomics_GetsNoAtomicAccess) {
  fake_device_.attributes.atomic_cap = IBV_ATOMIC_NONE;
  create();
  EXPECT_EQ(last().qp_access_flags & IBV_ACCESS_REMOTE_ATOMIC, 0U);
}

TEST_F(QpTest, AtomicsOfTwoDevices_ExcludeEachOtherWhereBothSaySo) {
  constexpr std::uint32_t kRxe = 0xffffff;
  FakeDevice& other = fake_.add_device("mlx5_1");
  struct Case {
    ibv_atomic_cap first;
    ibv_atomic_cap second;
    std::uint32_t vendor;
    bool exclude;
  };
  for (const Case& one :
       {Case{IBV_ATOMIC_HCA, IBV_ATOMIC_HCA, 1, false}, Case{IBV_ATOMIC_GLOB, IBV_ATOMIC_GLOB, 1, true},
        Case{IBV_ATOMIC_HCA, IBV_ATOMIC_GLOB, 1, false}, Case{IBV_ATOMIC_GLOB, IBV_ATOMIC_HCA, 1, false},
        Case{IBV_ATOMIC_HCA, IBV_ATOMIC_HCA, kRxe, true}}) {
    fake_device_.attributes.atomic_cap = one.first;
    other.attributes.atomic_cap = one.second;
    fake_device_.attributes.vendor_id = other.attributes.vendor_id = one.vendor;
    open();
    const auto device = Device::open(fake_.table, nullptr, &other.device, false);
    ASSERT_TRUE(device);
    Port second = port_;
    second.port_num = 1;
    EXPECT_TRUE(atomics_exclude_each_other(std::vector<const Port*>{&port_, &second}));
    second.device = device->get();
    EXPECT_EQ(atomics_exclude_each_other(std::vector<const Port*>{&port_, &second}), one.exclude) << one.vendor;
  }
}

TEST_F(QpTest, ConnectOnRoce_SetsGlobalAddress) {
  const Moved moved =
      connect(kRoceRemote, {.mtu = IBV_MTU_4096, .traffic_class = 106, .service_level = 3, .flow_label = 77});
  const ibv_qp_attr& set = moved.rtr;
  EXPECT_EQ(set.path_mtu, IBV_MTU_4096);
  EXPECT_EQ(set.dest_qp_num, 77U);
  EXPECT_EQ(set.max_dest_rd_atomic, 16);
  EXPECT_EQ(set.min_rnr_timer, 12);
  EXPECT_EQ(set.ah_attr.is_global, 1);
  EXPECT_EQ(set.ah_attr.port_num, 2);
  EXPECT_EQ(set.ah_attr.sl, 3);
  EXPECT_EQ(set.ah_attr.grh.sgid_index, 3);
  EXPECT_EQ(set.ah_attr.grh.traffic_class, 106);
  EXPECT_EQ(set.ah_attr.grh.hop_limit, 255);
  EXPECT_EQ(set.ah_attr.grh.flow_label, 77U);
  EXPECT_EQ(to_string(set.ah_attr.grh.dgid), "::ffff:10.0.0.2");
  EXPECT_EQ(moved.rtr_mask, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

TEST_F(QpTest, ConnectOnInfiniband_UsesLid) {
  port_ = infiniband_port();
  const ibv_ah_attr path = connect(kInfinibandRemote, {.service_level = 2}).rtr.ah_attr;
  EXPECT_EQ(path.is_global, 0);
  EXPECT_EQ(path.dlid, 18);
  EXPECT_EQ(path.sl, 2);
}

TEST_F(QpTest, ConnectAcrossSubnets_UsesGid) {
  port_ = infiniband_port();
  const ibv_ah_attr path = connect(infiniband_remote("fec0:0:0:7::2")).rtr.ah_attr;
  EXPECT_EQ(path.is_global, 1);
  EXPECT_EQ(to_string(path.grh.dgid), "fec0:0:0:7::2");
}

// The FLID is in the third group of the GID; the routers forward by it.
TEST_F(QpTest, ConnectAcrossSubnetsWithFlid_UsesFlidAsLid) {
  port_ = infiniband_port("fec0:0:8001:6::1", 1);
  const ibv_ah_attr path = connect(infiniband_remote("fec0:0:8002:7::2")).rtr.ah_attr;
  EXPECT_EQ(path.is_global, 1);
  EXPECT_EQ(path.dlid, 0x8002);
  EXPECT_EQ(path.grh.sgid_index, 1);
  EXPECT_EQ(to_string(path.grh.dgid), "fec0:0:8002:7::2");
}

// As in NCCL, only the low 16 bits of the prefix name the subnet.
TEST_F(QpTest, ConnectWithinSubnetWithFlid_UsesLid) {
  port_ = infiniband_port("fec0:0:8001:7::1", 1);
  const ibv_ah_attr path = connect(infiniband_remote("fec0:0:8002:7::2")).rtr.ah_attr;
  EXPECT_EQ(path.is_global, 0);
  EXPECT_EQ(path.dlid, 18);
}

TEST_F(QpTest, ConnectWhereEitherEndDemandsGrh_HasLidAndGrh) {
  port_ = infiniband_port();
  for (const bool local : {false, true}) {
    port_.grh_required = local;
    QpAddress remote = kInfinibandRemote;
    remote.grh_required = !local;
    const ibv_ah_attr path = connect(remote).rtr.ah_attr;
    EXPECT_EQ(path.is_global, 1);
    EXPECT_EQ(path.dlid, 18);
    EXPECT_EQ(to_string(path.grh.dgid), "fe80::2");
  }
}

// A flush QP is connected to itself.
TEST_F(QpTest, AddressOfQp_SaysWhetherPortDemandsGrh) {
  port_ = infiniband_port();
  port_.grh_required = true;
  const RcQp qp = create();
  EXPECT_TRUE(qp_address(port_, qp.qp.get()).grh_required);
}

TEST_F(QpTest, ConnectBetweenLinkLayers_IsRejected) {
  const RcQp qp = create();
  static_cast<void>(modified());
  const QpConnection connection{.remote = kInfinibandRemote, .ece = ibv_ece{0x15b3, 7, 0}};
  const Result<ConnectedQp> connected = connect_qp(qp.qp.get(), port_, connection, config_);
  ASSERT_FALSE(connected);
  EXPECT_EQ(connected.error().kind, ErrorKind::kRemote);
  EXPECT_TRUE(modified().empty());
  EXPECT_FALSE(fake_.ece_set);
}

// In RTR it would execute what the peer sends.
TEST_F(QpTest, RtsIsRefused_QpGoesToErr) {
  const RcQp qp = create();
  int calls = 0;
  fake_.on_modify_qp = [&calls] { return ++calls == 2 ? EIO : 0; };
  const Result<ConnectedQp> connected = connect_qp(qp.qp.get(), port_, {.remote = kRoceRemote}, config_);
  ASSERT_FALSE(connected);
  EXPECT_STREQ(connected.error().operation, "ibv_modify_qp to RTS");
  EXPECT_EQ(connected.error().sys_errno, EIO);
  EXPECT_EQ(last().qp_state, IBV_QPS_ERR);
}

TEST_F(QpTest, ConnectBetweenGidTypes_IsRejected) {
  const RcQp qp = create();
  static_cast<void>(modified());
  port_.gid.version = RoceVersion::kV2;
  QpAddress remote = kRoceRemote;
  const auto rejected = [&]() -> std::string {
    const Result<ConnectedQp> connected = connect_qp(qp.qp.get(), port_, {.remote = remote}, config_);
    if (connected) return "";
    EXPECT_EQ(connected.error().kind, ErrorKind::kRemote);
    EXPECT_EQ(connected.error().step, SetupStep::kMatchGids);
    return connected.error().operation;
  };
  EXPECT_EQ(rejected(), "") << "the peer's version is not known";
  remote.roce_version = RoceVersion::kV2;
  EXPECT_EQ(rejected(), "");
  EXPECT_EQ(modified().size(), 4U);
  remote.roce_version = RoceVersion::kV1;
  EXPECT_EQ(rejected(), "one end uses RoCE v1, the other RoCE v2");
  remote.roce_version = RoceVersion::kV2;
  remote.gid = fake_gid("fe80::2", 0).gid;
  EXPECT_EQ(rejected(), "one end has an IPv4 GID, the other an IPv6 GID");
  port_.gid.gid = fake_gid("2001:db8::1", 0).gid;
  EXPECT_EQ(rejected(), "");
  port_.gid.version = remote.roce_version = RoceVersion::kV1;
  EXPECT_EQ(rejected(), "");
  EXPECT_EQ(modified().size(), 4U);
}

TEST_F(QpTest, ConnectFails_GivesErrno) {
  const RcQp qp = create();
  for (const int code : {ETIMEDOUT, ENETUNREACH, ENODEV, EINVAL}) {
    fake_.failures["modify_qp"] = code;
    const Result<ConnectedQp> connected = connect_qp(qp.qp.get(), port_, {.remote = kRoceRemote}, config_);
    ASSERT_FALSE(connected);
    EXPECT_EQ(connected.error().sys_errno, code);
    EXPECT_STREQ(connected.error().operation, "ibv_modify_qp to RTR");
    EXPECT_EQ(is_unresolved(connected.error()), code == ETIMEDOUT);
  }
  EXPECT_FALSE(is_unresolved(system_error("ibv_modify_qp to RTS", ETIMEDOUT))) << "the address was resolved";
}

TEST_F(QpTest, ConnectToRts_SetsAttributes) {
  config_.timeout = 14;
  config_.retry_count = 6;
  const ibv_qp_attr set = connect(kRoceRemote).rts;
  EXPECT_EQ(set.timeout, 14);
  EXPECT_EQ(set.retry_cnt, 6);
  EXPECT_EQ(set.rnr_retry, 7);
  EXPECT_EQ(set.max_rd_atomic, 16);
  EXPECT_EQ(last_mask(), IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                             IBV_QP_MAX_QP_RD_ATOMIC);
}

TEST_F(QpTest, OutstandingReadsBeyondDevice_AreReduced) {
  fake_device_.attributes.max_qp_rd_atom = 4;
  fake_device_.attributes.max_qp_init_rd_atom = 128;
  const Moved moved = connect(kRoceRemote);
  EXPECT_EQ(moved.rtr.max_dest_rd_atomic, 4);
  EXPECT_EQ(moved.rts.max_rd_atomic, 16);
  EXPECT_EQ(connect(kRoceRemote, {}, 2).rts.max_rd_atomic, 2) << "of the peer";
}

TEST_F(QpTest, ConnectedQp_BeginsWithPsnsOfBothEnds) {
  const RcQp qp = create();
  static_cast<void>(modified());
  ASSERT_TRUE(
      connect_qp(qp.qp.get(), port_, {.remote = kRoceRemote, .psns = {.expected = 5, .first = 0xfffff0}}, config_));
  const std::vector<FakeVerbs::Modification> made = modified();
  ASSERT_EQ(made.size(), 2U);
  EXPECT_EQ(made[0].attributes.rq_psn, 5U);
  EXPECT_EQ(made[1].attributes.sq_psn, 0xfffff0U);
}

TEST_F(QpTest, FirstPsns_DifferBetweenConnectionsAndRounds) {
  std::set<std::uint32_t> psns;
  for (std::uint64_t connection = 0; connection < 16; ++connection) {
    for (const std::uint32_t round : {0U, 1U, 2U, 100U}) {
      const std::uint32_t psn = first_psn(connection << 32, round);
      EXPECT_LE(psn, kPsnMask);
      psns.insert(psn);
    }
  }
  EXPECT_EQ(psns.size(), 16U * 4U);
}

// Eight follow one another from a multiple of 8; fewer begin at any label. None is 0, and all fit into 14 bits.
TEST_F(QpTest, FlowLabels_DifferBetweenQps) {
  for (const std::uint64_t connection : {std::uint64_t{0}, std::uint64_t{0x1234'5678'9abc'def0}, ~std::uint64_t{0}}) {
    for (std::size_t qp = 0; qp < 128; ++qp) {
      EXPECT_EQ(flow_label(connection, qp, 128), flow_label(connection, 0, 128) + qp);
      EXPECT_LT(flow_label(connection, qp, 128), 1U << 14);
    }
    EXPECT_EQ(flow_label(connection, 0, 8) % 8, 0U);
    EXPECT_NE(flow_label(connection, 0, 8), 0U);
    EXPECT_LT(flow_label(connection, 4095, 4096), 1U << 14) << "more QPs than labels: they repeat";
  }
  EXPECT_EQ(flow_label(std::uint64_t{5} << 32, 0, 4) % 8, 5U);
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

// Whether the device has accepted the peer's options; an errno if it has refused to be connected.
class QpEceTest : public QpTest {
 protected:
  Result<bool> accepts(const RcQp& qp) {
    const Result<ConnectedQp> connected =
        connect_qp(qp.qp.get(), port_, {.remote = kRoceRemote, .ece = ibv_ece{0x15b3, 7, 0}}, config_);
    if (!connected) return connected.error();
    return connected->ece;
  }
};

TEST_F(QpEceTest, EceSupported_IsQueriedAndSet) {
  fake_device_.ece_errno = 0;
  const RcQp qp = create();
  const Result<std::optional<ibv_ece>> ece = query_ece(qp.qp.get(), *device_);
  ASSERT_TRUE(ece && ece->has_value());
  EXPECT_EQ((*ece)->vendor_id, 0x15b3U);
  const Result<bool> accepted = accepts(qp);
  ASSERT_TRUE(accepted);
  EXPECT_TRUE(*accepted);
  ASSERT_TRUE(fake_.ece_set);
  EXPECT_EQ(fake_.ece_set->options, 7U);
}

TEST_F(QpEceTest, NoOptionsOfPeer_NoneAreSet) {
  fake_device_.ece_errno = 0;
  connect(kRoceRemote);
  EXPECT_FALSE(fake_.ece_set);
}

TEST_F(QpEceTest, EceUnsupported_IsNoError) {
  const RcQp qp = create();
  for (const int code : {EOPNOTSUPP, EPROTONOSUPPORT, ENOSYS}) {
    fake_device_.ece_errno = code;
    const Result<std::optional<ibv_ece>> ece = query_ece(qp.qp.get(), *device_);
    ASSERT_TRUE(ece);
    EXPECT_FALSE(ece->has_value());
    const Result<bool> accepted = accepts(qp);
    ASSERT_TRUE(accepted);
    EXPECT_FALSE(*accepted);
  }
  fake_device_.ece_errno = EIO;
  EXPECT_EQ(query_ece(qp.qp.get(), *device_).error().sys_errno, EIO);
  static_cast<void>(modified());
  EXPECT_EQ(accepts(qp).error().sys_errno, EIO);
  EXPECT_TRUE(modified().empty()) << "the options are set before the first modification";
}

TEST_F(QpEceTest, LibraryWithoutEce_IsNoError) {
  fake_.table.query_ece = nullptr;
  fake_.table.set_ece = nullptr;
  const RcQp qp = create();
  EXPECT_FALSE(query_ece(qp.qp.get(), *device_)->has_value());
  EXPECT_FALSE(*accepts(qp));
}

}  // namespace
}  // namespace verbatim
