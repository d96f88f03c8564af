// New QPs for a lane that is down, step by step.
#include "net/transfer/lane_renewal.h"

#include <gtest/gtest.h>

#include "unit/support/fake_verbs.h"

namespace verbatim {
namespace {

// A receiver's lane of one QP.
class LaneRenewalOfReceiver : public ::testing::Test {
 protected:
  void SetUp() override {
    FakeDevice& fake = verbs_.add_device("mlx5_0");
    fake.add_roce_port();
    fake.attributes.max_cqe = 1000;
    fake.attributes.max_qp_wr = 1000;
    fake.attributes.max_sge = 1;
    Result<std::unique_ptr<Device>> device = Device::open(verbs_.table, nullptr, &fake.device, false);
    ASSERT_TRUE(device);
    device_ = std::move(*device);
    port_.device = device_.get();
    port_.name = "mlx5_0:1";
    port_.link_layer = IBV_LINK_LAYER_ETHERNET;
    port_.active_mtu = IBV_MTU_1024;
    port_.gid = {0, fake_gid("::ffff:10.0.0.1", IBV_GID_TYPE_ROCE_V2).gid, RoceVersion::kV2};
    EndpointSizes sizes;
    sizes.qps = 1;
    sizes.caps = {.send_wr = 16, .recv_wr = 16, .inline_bytes = 0};
    Result<Endpoint> endpoint = Endpoint::create({&port_}, sizes, config_);
    ASSERT_TRUE(endpoint);
    endpoint_ = std::make_unique<Endpoint>(std::move(*endpoint));
    wire::Hello peer;
    peer.devices.push_back({});
    peer.devices[0].link_layer = IBV_LINK_LAYER_ETHERNET;
    peer.devices[0].mtu = IBV_MTU_1024;
    peer.qps.push_back({.number = 900});
    VerbBudget budget = VerbBudget::unlimited();
    ASSERT_TRUE(endpoint_->connect(peer, config_, -1, budget));
    renewal_.lane_down(0, 0, false);
  }

  void receive_offer(std::uint32_t round) {
    wire::LaneAddress offer;
    offer.round = round;
    offer.qps = 1;
    offer.qp_numbers[0] = 1000 + round;
    EXPECT_TRUE(renewal_.receive(offer));
  }

  LaneRenewal::Outcome renew() {
    const std::uint8_t qp = 0;
    wire::LaneAddress answer;
    return renewal_.renew(0, {*endpoint_, config_, {&qp, 1}, false}, answer);
  }

  // QPs that lead to the peer's of this round can be adopted.
  void expect_adopted(std::uint32_t round) {
    EXPECT_EQ(renewal_.ready(0), round);
    const std::optional<LaneQps> made = renewal_.adopt(0, round);
    ASSERT_TRUE(made);
    EXPECT_EQ(made->local.round, round);
    EXPECT_EQ(made->remote.qp_numbers[0], 1000 + round);
  }

  FakeVerbs verbs_;
  std::unique_ptr<Device> device_;
  Port port_;
  Config config_;
  std::unique_ptr<Endpoint> endpoint_;
  LaneRenewal renewal_{1, false};
};

TEST_F(LaneRenewalOfReceiver, Offer_QpsCanBeAdopted) {
  EXPECT_EQ(renewal_.due_ns(), kNever);
  receive_offer(1);
  EXPECT_EQ(renew(), LaneRenewal::Outcome::kReady);
  expect_adopted(1);
}

// The sender has given up its first offer, for which QPs are ready: the application makes no calls.
TEST_F(LaneRenewalOfReceiver, NextOfferWhileQpsAreReady_OthersAreMade) {
  receive_offer(1);
  EXPECT_EQ(renew(), LaneRenewal::Outcome::kReady);
  receive_offer(2);
  EXPECT_EQ(renewal_.ready(0), std::nullopt);
  EXPECT_EQ(renewal_.due_ns(), 0U);
  EXPECT_EQ(renew(), LaneRenewal::Outcome::kReady);
  EXPECT_FALSE(renewal_.adopt(0, 1)) << "as after ready() has returned 1";
  expect_adopted(2);
}

// The same while they are being made.
TEST_F(LaneRenewalOfReceiver, NextOfferWhileQpsAreMade_OthersAreMade) {
  receive_offer(1);
  verbs_.on_create_qp = [&] {
    receive_offer(2);
    return 0;
  };
  EXPECT_EQ(renew(), LaneRenewal::Outcome::kNothing);
  verbs_.on_create_qp = nullptr;
  EXPECT_EQ(renewal_.due_ns(), 0U);
  EXPECT_EQ(renew(), LaneRenewal::Outcome::kReady);
  expect_adopted(2);
}

// After a side channel was lost, offers are sent again.
TEST_F(LaneRenewalOfReceiver, SameOfferAgain_QpsStay) {
  receive_offer(1);
  EXPECT_EQ(renew(), LaneRenewal::Outcome::kReady);
  const int qps = verbs_.live("qp");
  receive_offer(1);
  expect_adopted(1);
  EXPECT_EQ(renew(), LaneRenewal::Outcome::kNothing);
  EXPECT_EQ(verbs_.live("qp"), qps - 1);  // those that were adopted have gone with their owner
}

}  // namespace
}  // namespace verbatim
