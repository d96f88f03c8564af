#include <gtest/gtest.h>

#include <cerrno>
#include <string>
#include <thread>
#include <utility>

#include "endpoint_pool_fixture.h"
#include "hang.h"

namespace verbatim {
namespace {

// What the verb below uses: one test at a time.
struct HangingCreation {
  Hang hang;
  decltype(&ibv_create_qp) create_qp = nullptr;
};
HangingCreation* g_creation = nullptr;

ibv_qp* create_qp_or_hang(ibv_pd* pd, ibv_qp_init_attr* attributes) {
  g_creation->hang.enter("create_qp", pd->context);
  return g_creation->create_qp(pd, attributes);
}

// The first device hangs in create_qp, in a block of announced connections, in the block of a burst, and in the QPs of
// one connection.
class HangingPoolTest : public EndpointPoolTest, public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    EndpointPoolTest::SetUp();
    g_creation = &creation_;
    creation_.create_qp = std::exchange(fake_.table.create_qp, create_qp_or_hang);
    if (std::string(GetParam()) == "native") config_.qp_order = QpOrder::kNative;
    creation_.hang.begin("create_qp", devices_[0]->context());
    hanging_ = std::thread([this] { take(pool_->reserve(requested(0, 7))); });
    ASSERT_TRUE(ConnectedComms::eventually([&] {
      std::this_thread::yield();
      return creation_.hang.entered();
    }));
  }
  void TearDown() override {
    creation_.hang.end();
    hanging_.join();
    EXPECT_FALSE(creation_.hang.expired());
  }

  EndpointRequest requested(std::size_t device, std::uint64_t process) const {
    EndpointRequest made = std::string(GetParam()) == "burst" ? unannounced(process) : request(process);
    made.ports = {&ports_[device]};
    return made;
  }

  HangingCreation creation_;
  std::thread hanging_;
};

INSTANTIATE_TEST_SUITE_P(, HangingPoolTest, ::testing::Values("announced", "burst", "native"),
                         [](const auto& order) { return std::string(order.param); });

TEST_P(HangingPoolTest, ConnectionsOfOtherDevice_AreMade) {
  for (const std::uint64_t process : {3U, 4U}) take(pool_->reserve(requested(1, process)));
  pool_->announce({.send = {.peers = 1, .flows = 1}, .recv = {}});
  EXPECT_EQ(pool_->announced(CommKind::kSend).peers, 1U);
}

TEST_P(HangingPoolTest, ConnectionsOfSameDevice_GetNotYet) {
  if (std::string(GetParam()) == "native") return;  // each connection calls the device itself
  const Reservation waits = pool_->reserve(requested(0, 8));
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(is_ready(waits)) << "and the call returns";
}

TEST_P(HangingPoolTest, FullOtherDevice_ReleasesItsUnusedEndpoints) {
  const Config staggered;
  EndpointPool other(staggered, pools_);
  EndpointRequest announced = request(3);
  announced.ports = {&ports_[1]};
  take(other, other.reserve(announced));
  EXPECT_EQ(fake_.live("qp"), 7);
  fake_.on_create_qp = [&] { return fake_.live("qp") > 0 ? ENOMEM : 0; };
  const Endpoint made = take(pool_->reserve(requested(1, 4)));
  EXPECT_EQ(fake_.live("qp"), 1);
  fake_.on_create_qp = {};
}

TEST_P(HangingPoolTest, OrderOfOtherDevice_IsReset) {
  take(pool_->reserve(requested(1, 3)));
  pool_->reset_order();
  EXPECT_EQ(fake_.live("qp"), 0);
  EXPECT_EQ(take(pool_->reserve(requested(1, 4))).placement().position(0), 0U);
}

}  // namespace
}  // namespace verbatim
