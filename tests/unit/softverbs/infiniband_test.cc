//: program softverbs_devices_test link=verbs_test,libdl
//:   + sources=support/child.cc,link_trace.cc,main.cc,qp_pair_fixture.cc
//: test softverbs-infiniband filter=InfinibandAddress.* use=device
//:   + SOFTVERBS_LINK_LAYER=ib SOFTVERBS_GRH=required SOFTVERBS_SUBNETS=2

// InfiniBand addresses: ports that demand a GRH, and two subnets. The program runs with SOFTVERBS_LINK_LAYER=ib,
// SOFTVERBS_GRH=required, SOFTVERBS_SUBNETS=2 and two devices, which are in different subnets.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

constexpr Timers kOneAttempt{.timeout = 10, .retry_count = 0};
constexpr int kFlidIndex = 1;

ibv_gid gid_of(const Device& device, int index) {
  ibv_gid gid{};
  EXPECT_EQ(verbs().query_gid(device.context.get(), device.port_num, index, &gid), 0);
  return gid;
}

std::uint16_t flid_of(const ibv_gid& gid) {
  return static_cast<std::uint16_t>(gid.raw[4] << 8 | gid.raw[5]);
}

// The attributes for a connection from `from` to `to` through the GID of `device` at `gid_index`.
ibv_qp_attr with_grh(const Endpoint& from, const Endpoint& to, const Device& device, int gid_index, std::uint16_t lid) {
  ibv_qp_attr attr = from.rtr_attr(to.address());
  attr.ah_attr.is_global = 1;
  attr.ah_attr.grh.dgid = gid_of(device, gid_index);
  attr.ah_attr.grh.hop_limit = 64;
  attr.ah_attr.dlid = lid;
  return attr;
}

struct Link {
  Link(const Device& from, const Device& to)
      : from_device(from),
        to_device(to),
        source(from.pd.get(), 64),
        target(to.pd.get(), 64),
        a(from, {.timers = kOneAttempt}),
        b(to, {.timers = kOneAttempt}) {
    a.to_init();
    b.to_init();
  }

  // Connects both ends with these LIDs and sends a WRITE.
  ibv_wc_status write(int gid_index, std::uint16_t lid_of_a, std::uint16_t lid_of_b) {
    ibv_qp_attr to_b = with_grh(a, b, to_device, gid_index, lid_of_b);
    ibv_qp_attr to_a = with_grh(b, a, from_device, gid_index, lid_of_a);
    EXPECT_EQ(verbs().modify_qp(a.qp(), &to_b, kRtrMask), 0);
    EXPECT_EQ(verbs().modify_qp(b.qp(), &to_a, kRtrMask), 0);
    a.to_rts();
    b.to_rts();
    source.fill(1);
    EXPECT_EQ(
        post(a.qp(), IBV_WR_RDMA_WRITE, {source.sge()}, {.remote_addr = target.address(), .rkey = target.mr->rkey}), 0);
    const ibv_wc_status status = poll_one(a.send_cq()).status;
    if (status == IBV_WC_SUCCESS) {
      EXPECT_TRUE(std::ranges::equal(source.bytes(0, 64), target.bytes(0, 64)));
    }
    return status;
  }

  const Device& from_device;
  const Device& to_device;
  Region source;
  Region target;
  Endpoint a;
  Endpoint b;
};

class InfinibandAddress : public testing::Test {
 protected:
  Device first_ = open_device(0);
  Device second_ = open_device(1);
};

TEST_F(InfinibandAddress, Port_AnnouncesThatItDemandsGrh) {
  EXPECT_NE(first_.port.flags & IBV_QPF_GRH_REQUIRED, 0);
}

TEST_F(InfinibandAddress, WithoutGrh_IsRefused) {
  Link link(first_, first_);
  ibv_qp_attr attr = link.a.rtr_attr(link.b.address());
  EXPECT_EQ(verbs().modify_qp(link.a.qp(), &attr, kRtrMask), EINVAL);
}

TEST_F(InfinibandAddress, WithGrhAndLid_ReachesPortOfSubnet) {
  EXPECT_EQ(Link(first_, first_).write(0, first_.port.lid, first_.port.lid), IBV_WC_SUCCESS);
}

TEST_F(InfinibandAddress, Gids_NameSubnetAndFlid) {
  EXPECT_NE(gid_of(first_, 0).global.subnet_prefix, gid_of(second_, 0).global.subnet_prefix);
  EXPECT_EQ(flid_of(gid_of(first_, 0)), 0);
  EXPECT_NE(flid_of(gid_of(first_, kFlidIndex)), flid_of(gid_of(second_, kFlidIndex)));
}

TEST_F(InfinibandAddress, WithFlid_ReachesPortOfOtherSubnet) {
  Link link(first_, second_);
  EXPECT_EQ(link.write(kFlidIndex, flid_of(gid_of(first_, kFlidIndex)), flid_of(gid_of(second_, kFlidIndex))),
            IBV_WC_SUCCESS);
}

TEST_F(InfinibandAddress, WithLidOfOtherSubnet_ReachesNoPort) {
  EXPECT_EQ(Link(first_, second_).write(kFlidIndex, first_.port.lid, second_.port.lid), IBV_WC_RETRY_EXC_ERR);
}

}  // namespace
}  // namespace verbatim::test
