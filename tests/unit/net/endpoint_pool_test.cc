#include "net/connect/endpoint_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "support/fake_verbs.h"
#include "support/log_capture.h"

namespace verbatim {
namespace {

using Claim = std::shared_ptr<EndpointReservation>;

constexpr auto kPoolTimeout = std::chrono::seconds(20);

class EndpointPoolTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (std::size_t i = 0; i < 2; ++i) {
      FakeDevice& device = fake_.add_device("mlx5_" + std::to_string(i));
      device.add_roce_port();
      device.attributes.max_cqe = 100000;
      device.attributes.max_qp_wr = 4096;
      device.attributes.max_sge = 4;
      device.attributes.max_qp = 100000;
      device.attributes.max_cq = 100000;
      Result<std::unique_ptr<Device>> opened = Device::open(fake_.table, nullptr, &device.device, false);
      ASSERT_TRUE(opened);
      devices_.push_back(std::move(*opened));
      ports_[i].device = devices_[i].get();
      ports_[i].name = "verbatim_" + devices_[i]->name();
    }
    make_pool();
  }

  void make_pool() {
    pool_.reset();
    pool_ = std::make_unique<EndpointPool>(config_, pools_);
  }

  static PeerId peer(std::uint64_t process) { return {1, process, 1, 0}; }

  EndpointRequest request(std::uint64_t process, std::size_t qps = 1) const {
    EndpointRequest request;
    request.ports = {&ports_[0]};
    request.sizes.qps = qps;
    request.self = peer(kSelf);
    request.peer = peer(process);
    request.traffic = {.peers = 4, .flows = 2};
    return request;
  }

  // The endpoint of a claim that need not be waited for.
  Endpoint take(const Claim& claim) { return take(*pool_, claim); }
  static Endpoint take(EndpointPool& pool, const Claim& claim) {
    const auto end = std::chrono::steady_clock::now() + kPoolTimeout;
    while (true) {
      Result<std::optional<Endpoint>> endpoint = pool.take(*claim);
      if (!endpoint) {
        ADD_FAILURE() << to_string(endpoint.error());
        std::abort();
      }
      if (*endpoint) return std::move(**endpoint);
      if (std::chrono::steady_clock::now() > end) std::abort();
    }
  }
  bool is_ready(const Claim& claim) {
    Result<std::optional<Endpoint>> endpoint = pool_->take(*claim);
    EXPECT_TRUE(endpoint);
    return endpoint && endpoint->has_value();
  }

  static constexpr std::uint64_t kSelf = 99;

  FakeVerbs fake_;
  std::vector<std::unique_ptr<Device>> devices_;
  Port ports_[2];
  Config config_;
  EndpointPools pools_;
  std::unique_ptr<EndpointPool> pool_;
};

std::uint32_t number(const Endpoint& endpoint, std::size_t qp = 0) {
  return endpoint.qps()[qp].qp->qp_num;
}

TEST_F(EndpointPoolTest, Reservation_FixesPositionAtFirstCall) {
  std::vector<Claim> claims;
  for (const std::uint64_t process : {7U, 7U, 3U, 3U}) claims.push_back(pool_->reserve(request(process)));
  EXPECT_EQ(fake_.live("qp"), 8) << "4 peers, 2 connections each";
  const Endpoint last = take(claims[3]);
  const Endpoint second = take(claims[1]);
  const Endpoint third = take(claims[2]);
  const Endpoint first = take(claims[0]);
  EXPECT_EQ(number(third), number(first) + 1) << "the first of the next peer";
  EXPECT_EQ(number(second), number(first) + 4);
  EXPECT_EQ(number(last), number(first) + 5);
  EXPECT_EQ(last.placement().order, QpOrder::kPool);
  EXPECT_EQ(last.placement().position(1, 0), 5U);
  EXPECT_EQ(fake_.live("qp"), 8);
}

TEST_F(EndpointPoolTest, NativeOrder_CreatesQpsWhenTaken) {
  config_.qp_order = QpOrder::kNative;
  make_pool();
  const Claim first = pool_->reserve(request(7));
  const Claim second = pool_->reserve(request(3));
  EXPECT_EQ(fake_.live("qp"), 0);
  const Endpoint later = take(second);
  const Endpoint earlier = take(first);
  EXPECT_LT(number(later), number(earlier));
  EXPECT_EQ(later.placement().position(1, 0), 0U);
  EXPECT_EQ(earlier.placement().position(1, 0), 1U);
}

TEST_F(EndpointPoolTest, NothingAnnounced_CreatesNoBlock) {
  EndpointRequest unknown = request(7);
  unknown.traffic = {};
  const Endpoint endpoint = take(pool_->reserve(unknown));
  EXPECT_EQ(fake_.live("qp"), 1);
  EXPECT_EQ(endpoint.placement().order, QpOrder::kNative);
}

TEST_F(EndpointPoolTest, QpPoolSetting_ReplacesAnnouncement) {
  config_.qp_pool = {.peers = 3, .qps = 4};
  make_pool();
  EndpointRequest unknown = request(7, 2);
  unknown.traffic = {};
  take(pool_->reserve(unknown));
  EXPECT_EQ(fake_.live("qp"), 3 * 4 - 2) << "two connections of two QPs to each of three, one gone";
}

TEST_F(EndpointPoolTest, ConnectionToSelf_TakesNoPosition) {
  const Endpoint first = take(pool_->reserve(request(7)));
  const Endpoint own = take(pool_->reserve(request(kSelf)));
  const Endpoint second = take(pool_->reserve(request(3)));
  EXPECT_EQ(own.placement().order, QpOrder::kNative);
  EXPECT_EQ(second.placement().position(1, 0), 1U);
}

TEST_F(EndpointPoolTest, ReleasedReservation_DelaysNoOther) {
  pool_->reserve(request(7)).reset();  // its connect failed
  const Endpoint second = take(pool_->reserve(request(3)));
  EXPECT_EQ(second.placement().position(1, 0), 1U);
  const Endpoint again = take(pool_->reserve(request(7)));
  EXPECT_EQ(again.placement().position(1, 0), 4U) << "its first place has been used";
  EXPECT_EQ(fake_.live("qp"), 7);
}

TEST_F(EndpointPoolTest, MorePeersThanAnnounced_ContinueInFurtherBlocks) {
  std::vector<Endpoint> all;
  for (std::uint64_t process = 0; process < 130; ++process) {
    if (process == kSelf) continue;
    for (int k = 0; k < 3; ++k) all.push_back(take(pool_->reserve(request(process))));
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].placement().order, QpOrder::kPool);
    EXPECT_EQ(all[i].placement().block, i / 12);
    EXPECT_EQ(all[i].placement().position(1, 0), i % 3 * 4 + i / 3 % 4);
  }
  EXPECT_LT(fake_.live("qp"), static_cast<int>(all.size()) * 2);
}

TEST_F(EndpointPoolTest, CollectiveSideAndDevice_HaveSeparateBlocks) {
  EndpointRequest collective = request(7);
  collective.traffic = {.peers = 4, .flows = 3, .collective = true};
  EndpointRequest recv = request(7);
  recv.side = QpSide::kRecv;
  EndpointRequest other_device = request(7);
  other_device.ports = {&ports_[1]};
  const Endpoint first = take(pool_->reserve(request(5)));
  std::vector<Endpoint> others;
  for (const EndpointRequest& one : {collective, recv, other_device}) {
    others.push_back(take(pool_->reserve(one)));
    EXPECT_EQ(others.back().placement().position(1, 0), 0U);
  }
  EXPECT_TRUE(others[0].placement().collective);
  const Endpoint second = take(pool_->reserve(request(6)));
  EXPECT_EQ(number(second), number(first) + 1);
}

TEST_F(EndpointPoolTest, Block_StaysWithinShareOfDevice) {
  fake_.devices()[0]->attributes.max_qp = 20;
  devices_[0] = *Device::open(fake_.table, nullptr, &fake_.devices()[0]->device, false);
  ports_[0].device = devices_[0].get();
  EXPECT_EQ(max_block_qps(std::vector<const Port*>{&ports_[0]}), 5U);
  const Endpoint one = take(pool_->reserve(request(7)));
  EXPECT_EQ(fake_.live("qp"), 4) << "one row of four";
  EndpointRequest wide = request(8, 6);
  const Endpoint native = take(pool_->reserve(wide));
  EXPECT_EQ(native.placement().order, QpOrder::kNative) << "not even one connection";
}

TEST_F(EndpointPoolTest, DeviceAtQpLimit_FallsBackToNativeOrder) {
  const LogCapture log;
  int left = 5;
  fake_.qp_number = [&](std::uint32_t made) {
    if (--left == 0) fake_.failures["create_qp"] = ENOMEM;
    return made;
  };
  const Claim claim = pool_->reserve(request(7));
  EXPECT_EQ(fake_.live("qp"), 0) << "half a block is no block";
  EXPECT_EQ(fake_.live("cq"), 0);
  fake_.failures.clear();
  left = 100;
  EXPECT_EQ(take(claim).placement().order, QpOrder::kNative);
  EXPECT_EQ(take(pool_->reserve(request(8))).placement().order, QpOrder::kNative);
  EXPECT_TRUE(log.warnings().empty());
}

TEST_F(EndpointPoolTest, UnusedBlock_IsFreedAtQpLimit) {
  EndpointPool other(config_, pools_);
  const Endpoint used = take(pool_->reserve(request(7)));
  EXPECT_EQ(fake_.live("qp"), 8);
  int allowed = 0;  // the device is full as long as more than this many are alive
  fake_.qp_number = [](std::uint32_t made) { return made; };
  fake_.on_create_qp = [&] { return fake_.live("qp") > allowed ? ENOMEM : 0; };
  allowed = 7;
  EndpointRequest unknown = request(3);
  unknown.traffic = {};
  const Endpoint made = take(other, other.reserve(unknown));
  EXPECT_EQ(fake_.live("qp"), 2) << "all that waited is gone, what is used is not";
  fake_.on_create_qp = {};
  const Endpoint next = take(pool_->reserve(request(8)));
  EXPECT_EQ(next.placement().order, QpOrder::kNative) << "its place is empty";
}

TEST_F(EndpointPoolTest, Forget_StartsNewBlock) {
  take(pool_->reserve(request(7)));
  take(pool_->reserve(request(3)));
  EXPECT_GT(fake_.live("qp"), 0);
  pool_->reset_order();
  EXPECT_EQ(fake_.live("qp"), 0);
  EXPECT_EQ(take(pool_->reserve(request(3))).placement().position(1, 0), 0U);
}

TEST_F(EndpointPoolTest, Announcement_IsPerThread) {
  const Announcement mine{.send = {.peers = 2, .flows = 3}, .recv = {.peers = 4, .flows = 5, .collective = true}};
  pool_->announce(mine);
  std::thread([&] {
    EXPECT_EQ(pool_->announced(QpSide::kSend).peers, 2U) << "nothing of its own: what was said last";
    pool_->announce({.send = {.peers = 6, .flows = 7}, .recv = {}});
    EXPECT_EQ(pool_->announced(QpSide::kSend).peers, 6U);
  }).join();
  EXPECT_EQ(pool_->announced(QpSide::kSend).flows, 3U);
  EXPECT_TRUE(pool_->announced(QpSide::kRecv).collective);
}

class EndpointPoolGatherTest : public EndpointPoolTest {
 protected:
  void SetUp() override {
    config_.qp_order = QpOrder::kGather;
    config_.qp_gather_us = 2000;
    EndpointPoolTest::SetUp();
  }
};

TEST_F(EndpointPoolGatherTest, LastAnnouncedReservation_CreatesAllQps) {
  std::vector<Claim> claims;
  for (const std::uint64_t process : {5U, 5U, 9U, 9U, 2U, 2U, 4U, 4U})
    claims.push_back(pool_->reserve(request(process)));
  EXPECT_EQ(fake_.live("qp"), 8) << "the eighth was the last";
  std::vector<Endpoint> made;
  for (const Claim& claim : claims) made.push_back(take(claim));
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(made[i].placement().position(1, 0), i % 2 * 4 + i / 2);
    EXPECT_EQ(number(made[i]), number(made[0]) + i % 2 * 4 + i / 2);
  }
}

TEST_F(EndpointPoolGatherTest, PollAfterDeadline_CreatesAllReservations) {
  const auto start = std::chrono::steady_clock::now();
  const Claim first = pool_->reserve(request(5));
  const Claim second = pool_->reserve(request(9));
  const Endpoint made = take(second);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::microseconds(2000));
  EXPECT_TRUE(is_ready(first)) << "the other need not be asked again";
  EXPECT_EQ(made.placement().peers, 2U);
}

TEST_F(EndpointPoolGatherTest, ReleasedReservation_IsNotCreated) {
  Claim gone = pool_->reserve(request(5));
  const Claim stays = pool_->reserve(request(9));
  gone.reset();
  EXPECT_EQ(take(stays).placement().position(1, 0), 0U);
  EXPECT_EQ(fake_.live("qp"), 0);
}

TEST_F(EndpointPoolGatherTest, ContinuousReservations_WaitAtMostTwoMilliseconds) {
  config_.qp_gather_us = 2000;
  make_pool();
  const auto start = std::chrono::steady_clock::now();
  std::vector<Claim> claims;
  EndpointRequest many = request(0);
  many.traffic = {.peers = 1000000, .flows = 1};
  while (fake_.live("qp") == 0 && std::chrono::steady_clock::now() - start < kPoolTimeout) {
    many.peer = peer(claims.size() + 1000);
    claims.push_back(pool_->reserve(many));
    pool_->poll();
  }
  EXPECT_GT(fake_.live("qp"), 0) << "a stream of new ones must not keep the first waiting";
}

TEST_F(EndpointPoolGatherTest, DeviceAtQpLimit_FallsBackToNativeOrder) {
  const LogCapture log;
  const Claim claim = pool_->reserve(request(5));
  fake_.failures["create_qp"] = ENOMEM;
  std::this_thread::sleep_for(std::chrono::milliseconds(3));
  pool_->poll();
  fake_.failures.clear();
  EXPECT_EQ(take(claim).placement().order, QpOrder::kNative);
  EXPECT_TRUE(log.warnings().empty());
}

TEST_F(EndpointPoolGatherTest, RingOrder_StartsAfterSelf) {
  config_.qp_order = QpOrder::kRing;
  make_pool();
  std::vector<Claim> claims;
  for (const std::uint64_t process : {200U, 10U, 100U, 20U}) {
    for (int k = 0; k < 2; ++k) claims.push_back(pool_->reserve(request(process)));
  }
  // Behind 99 come 100, 200, 10 and 20.
  const std::uint32_t columns[] = {1, 2, 0, 3};
  for (std::size_t i = 0; i < claims.size(); ++i) {
    EXPECT_EQ(take(claims[i]).placement().position(1, 0), i % 2 * 4 + columns[i / 2]);
  }
}

}  // namespace
}  // namespace verbatim
