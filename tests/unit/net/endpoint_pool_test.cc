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

using Reservation = std::shared_ptr<EndpointReservation>;

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

  // The same, with nothing announced.
  EndpointRequest unannounced(std::uint64_t process, std::size_t qps = 1) const {
    EndpointRequest unknown = request(process, qps);
    unknown.traffic = {};
    return unknown;
  }

  // From communicator 25 of a process to communicator `context` of the same process.
  EndpointRequest in_process(std::uint32_t context) const {
    EndpointRequest local = request(kSelf);
    local.self.context = 25;
    local.peer.context = context;
    return local;
  }

  // Polls until the reservation has its endpoint.
  Endpoint take(const Reservation& reservation) { return take(*pool_, reservation); }
  static Endpoint take(EndpointPool& pool, const Reservation& reservation) {
    const auto end = std::chrono::steady_clock::now() + kPoolTimeout;
    while (true) {
      Result<std::optional<Endpoint>> endpoint = pool.take(*reservation);
      if (!endpoint) {
        ADD_FAILURE() << to_string(endpoint.error());
        std::abort();
      }
      if (*endpoint) return std::move(**endpoint);
      if (std::chrono::steady_clock::now() > end) std::abort();
    }
  }
  bool is_ready(const Reservation& reservation) {
    Result<std::optional<Endpoint>> endpoint = pool_->take(*reservation);
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
  std::vector<Reservation> reservations;
  for (const std::uint64_t process : {7U, 7U, 3U, 3U}) reservations.push_back(pool_->reserve(request(process)));
  EXPECT_EQ(fake_.live("qp"), 8) << "4 peers, 2 connections each";
  const Endpoint last = take(reservations[3]);
  const Endpoint second = take(reservations[1]);
  const Endpoint third = take(reservations[2]);
  const Endpoint first = take(reservations[0]);
  EXPECT_EQ(number(third), number(first) + 1) << "the first flow of the second peer";
  EXPECT_EQ(number(second), number(first) + 4);
  EXPECT_EQ(number(last), number(first) + 5);
  EXPECT_EQ(last.placement().order, QpOrder::kStaggered);
  EXPECT_EQ(last.placement().position(0), 5U);
  EXPECT_EQ(fake_.live("qp"), 8);
}

TEST_F(EndpointPoolTest, NativeOrder_CreatesQpsWhenTaken) {
  config_.qp_order = QpOrder::kNative;
  make_pool();
  const Reservation first = pool_->reserve(request(7));
  const Reservation second = pool_->reserve(request(3));
  EXPECT_EQ(fake_.live("qp"), 0);
  const Endpoint later = take(second);
  const Endpoint earlier = take(first);
  EXPECT_LT(number(later), number(earlier));
  EXPECT_EQ(later.placement().position(0), 0U);
  EXPECT_EQ(earlier.placement().position(0), 1U);
}

TEST_F(EndpointPoolTest, QpPoolSetting_ReplacesAnnouncement) {
  config_.qp_pool = {.peers = 3, .qps = 4};
  make_pool();
  take(pool_->reserve(unannounced(7, 2)));
  EXPECT_EQ(fake_.live("qp"), 3 * 4 - 2) << "two connections of two QPs to each of three peers, one destroyed";
}

TEST_F(EndpointPoolTest, ConnectionToSelf_TakesNoPosition) {
  const Endpoint first = take(pool_->reserve(request(7)));
  const Endpoint own = take(pool_->reserve(request(kSelf)));
  const Endpoint second = take(pool_->reserve(request(3)));
  EXPECT_EQ(own.placement().order, QpOrder::kNative);
  EXPECT_EQ(second.placement().position(0), 1U);
}

TEST_F(EndpointPoolTest, ReleasedReservation_DelaysNoOther) {
  pool_->reserve(request(7)).reset();  // its connect failed
  const Endpoint second = take(pool_->reserve(request(3)));
  EXPECT_EQ(second.placement().position(0), 1U);
  const Endpoint again = take(pool_->reserve(request(7)));
  EXPECT_EQ(again.placement().position(0), 4U) << "a slot is assigned once";
  EXPECT_EQ(fake_.live("qp"), 7);
}

TEST_F(EndpointPoolTest, MorePeersThanAnnounced_ContinueInFurtherBlocks) {
  std::vector<Endpoint> all;
  for (std::uint64_t process = 0; process < 130; ++process) {
    if (process == kSelf) continue;
    for (int k = 0; k < 3; ++k) all.push_back(take(pool_->reserve(request(process))));
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::size_t flow = i % 3;  // two of them are announced: the third has a block of its own
    EXPECT_EQ(all[i].placement().order, QpOrder::kStaggered);
    EXPECT_EQ(all[i].placement().block, i / 12 * 2 + flow / 2);
    EXPECT_EQ(all[i].placement().position(0), flow % 2 * 4 + i / 3 % 4);
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
    EXPECT_EQ(others.back().placement().position(0), 0U);
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
  EXPECT_EQ(fake_.live("qp"), 4) << "one flow of four peers";
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
  const Reservation reservation = pool_->reserve(request(7));
  EXPECT_EQ(fake_.live("qp"), 0) << "an incomplete block is destroyed";
  EXPECT_EQ(fake_.live("cq"), 0);
  fake_.failures.clear();
  left = 100;
  EXPECT_EQ(take(reservation).placement().order, QpOrder::kNative);
  EXPECT_EQ(take(pool_->reserve(request(8))).placement().order, QpOrder::kNative);
  EXPECT_TRUE(log.warnings().empty());
}

TEST_F(EndpointPoolTest, UnusedBlock_IsFreedAtQpLimit) {
  EndpointPool other(config_, pools_);
  const Endpoint used = take(pool_->reserve(request(7)));
  EXPECT_EQ(fake_.live("qp"), 8);
  int allowed = 0;  // create_qp fails while more QPs than this exist
  fake_.qp_number = [](std::uint32_t made) { return made; };
  fake_.on_create_qp = [&] { return fake_.live("qp") > allowed ? ENOMEM : 0; };
  allowed = 7;
  const Endpoint made = take(other, other.reserve(unannounced(3)));
  EXPECT_EQ(fake_.live("qp"), 2) << "unused QPs are destroyed, others are not";
  fake_.on_create_qp = {};
  const Endpoint next = take(pool_->reserve(request(8)));
  EXPECT_EQ(next.placement().order, QpOrder::kNative) << "the endpoint of its slot was destroyed";
}

TEST_F(EndpointPoolTest, ResetOrder_StartsNewBlock) {
  take(pool_->reserve(request(7)));
  take(pool_->reserve(request(3)));
  EXPECT_GT(fake_.live("qp"), 0);
  pool_->reset_order();
  EXPECT_EQ(fake_.live("qp"), 0);
  EXPECT_EQ(take(pool_->reserve(request(3))).placement().position(0), 0U);
}

TEST_F(EndpointPoolTest, Announcement_IsPerThread) {
  const Announcement first{.send = {.peers = 2, .flows = 3}, .recv = {.peers = 4, .flows = 5, .collective = true}};
  pool_->announce(first);
  std::thread([&] {
    EXPECT_EQ(pool_->announced(QpSide::kSend).peers, 2U)
        << "the thread has announced nothing: the last announcement counts";
    pool_->announce({.send = {.peers = 6, .flows = 7}, .recv = {}});
    EXPECT_EQ(pool_->announced(QpSide::kSend).peers, 6U);
  }).join();
  EXPECT_EQ(pool_->announced(QpSide::kSend).flows, 3U);
  EXPECT_TRUE(pool_->announced(QpSide::kRecv).collective);
}

// The caller is rank 2 of ranks with the identities 10, 20, 25, 30 and 40.
TEST_F(EndpointPoolTest, RotatedPeersOfProcess_KeepOrderOfRequests) {
  std::vector<Reservation> reservations;
  for (const std::uint32_t context : {30U, 40U, 10U, 20U}) {
    for (int k = 0; k < 2; ++k) {
      reservations.push_back(pool_->reserve(in_process(context)));
      EXPECT_TRUE(is_ready(reservations.back())) << "a caller that rotates does not wait";
    }
  }
  std::uint32_t peer_index = 0;
  pool_->reset_order();
  for (const std::uint32_t context : {30U, 40U, 10U, 20U}) {
    EXPECT_EQ(take(pool_->reserve(in_process(context))).placement().position(0), peer_index++);
  }
}

TEST_F(EndpointPoolTest, PeersOfProcessNotRotated_AreInRingOrder) {
  std::vector<Reservation> reservations;
  for (const std::uint32_t context : {10U, 20U, 30U, 40U}) {
    for (int k = 0; k < 2; ++k) {
      EXPECT_EQ(fake_.live("qp"), 0) << "its order is not known yet";
      reservations.push_back(pool_->reserve(in_process(context)));
    }
  }
  EXPECT_EQ(fake_.live("qp"), 8) << "the eighth was the last that is announced";
  const std::uint32_t indexes[] = {2, 3, 0, 1};
  std::vector<Endpoint> made;
  for (const Reservation& reservation : reservations) made.push_back(take(reservation));
  for (std::size_t i = 0; i < made.size(); ++i) {
    EXPECT_EQ(made[i].placement().position(0), i % 2 * 4 + indexes[i / 2]);
    EXPECT_EQ(number(made[i]), number(made[4]) + made[i].placement().position(0));
  }
}

TEST_F(EndpointPoolTest, FlowByFlowNotRotated_IsInRingOrder) {
  std::vector<Reservation> reservations;
  for (int k = 0; k < 2; ++k) {
    for (const std::uint32_t context : {10U, 20U, 30U, 40U})
      reservations.push_back(pool_->reserve(in_process(context)));
  }
  const std::uint32_t indexes[] = {2, 3, 0, 1};
  for (std::size_t i = 0; i < reservations.size(); ++i) {
    EXPECT_EQ(take(reservations[i]).placement().position(0), i / 4 * 4 + indexes[i % 4]);
  }
}

TEST_F(EndpointPoolTest, OrderBecomesKnown_WaitingReservationsAreReady) {
  const Reservation first = pool_->reserve(in_process(10));
  const Reservation second = pool_->reserve(in_process(40));
  EXPECT_EQ(fake_.live("qp"), 0);
  const Reservation third = pool_->reserve(in_process(20));  // not rising: neither rank order nor its rotation
  EXPECT_EQ(fake_.live("qp"), 8);
  EXPECT_EQ(take(first).placement().position(0), 0U);
  EXPECT_EQ(take(second).placement().position(0), 1U);
  EXPECT_EQ(take(third).placement().position(0), 2U);
}

TEST_F(EndpointPoolTest, NoFurtherPeer_WaitingReservationIsReadyAfterBurst) {
  const Reservation first = pool_->reserve(in_process(10));
  EXPECT_EQ(take(first).placement().position(0), 0U);
  EXPECT_EQ(take(pool_->reserve(in_process(30))).placement().position(0), 1U) << "slots do not change later";
}

class EndpointPoolBurstTest : public EndpointPoolTest {
 protected:
  void SetUp() override {
    config_.qp_gather_us = 2000;
    EndpointPoolTest::SetUp();
  }
};

TEST_F(EndpointPoolBurstTest, EndOfBurst_CreatesAllQps) {
  const auto start = std::chrono::steady_clock::now();
  const Reservation first = pool_->reserve(unannounced(5));
  const Reservation second = pool_->reserve(unannounced(9));
  const Endpoint made = take(second);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::microseconds(2000));
  EXPECT_TRUE(is_ready(first)) << "one poll ends the burst for all";
  EXPECT_EQ(made.placement().order, QpOrder::kStaggered);
  EXPECT_EQ(made.placement().peers, 2U);
}

TEST_F(EndpointPoolBurstTest, SeveralPeers_AreInRingOrderAfterSelf) {
  std::vector<Reservation> reservations;
  for (const std::uint64_t process : {200U, 10U, 100U, 20U}) {
    for (int k = 0; k < 2; ++k) reservations.push_back(pool_->reserve(unannounced(process)));
  }
  // After 99 come 100, 200, 10 and 20.
  const std::uint32_t indexes[] = {1, 2, 0, 3};
  std::vector<Endpoint> made;
  for (const Reservation& reservation : reservations) made.push_back(take(reservation));
  for (std::size_t i = 0; i < made.size(); ++i) {
    EXPECT_EQ(made[i].placement().position(0), i % 2 * 4 + indexes[i / 2]);
    EXPECT_EQ(number(made[i]), number(made[4]) + made[i].placement().position(0));
  }
}

TEST_F(EndpointPoolBurstTest, PeersWithDifferentFlows_OnlyRequestedQpsAreCreated) {
  std::vector<Reservation> reservations;
  for (const std::uint64_t process : {5U, 5U, 9U, 9U, 9U}) reservations.push_back(pool_->reserve(unannounced(process)));
  std::vector<Endpoint> made;
  for (const Reservation& reservation : reservations) made.push_back(take(reservation));
  EXPECT_EQ(fake_.live("qp"), 5);
  const std::uint32_t positions[] = {0, 2, 1, 3, 5};
  const std::uint32_t numbers[] = {0, 2, 1, 3, 4};
  for (std::size_t i = 0; i < made.size(); ++i) {
    EXPECT_EQ(made[i].placement().position(0), positions[i]);
    EXPECT_EQ(number(made[i]), number(made[0]) + numbers[i]);
  }
}

TEST_F(EndpointPoolBurstTest, NextBurst_IsNextBlock) {
  EXPECT_EQ(take(pool_->reserve(unannounced(5))).placement().block, 0U);
  const Endpoint next = take(pool_->reserve(unannounced(5)));
  EXPECT_EQ(next.placement().block, 1U);
  EXPECT_EQ(next.placement().connection, 1U);
  EXPECT_EQ(take(pool_->reserve(request(5))).placement().block, 2U) << "announced by now";
}

TEST_F(EndpointPoolBurstTest, ReleasedReservation_IsNotCreated) {
  Reservation released = pool_->reserve(unannounced(5));
  const Reservation kept = pool_->reserve(unannounced(9));
  released.reset();
  EXPECT_EQ(take(kept).placement().position(0), 0U);
  EXPECT_EQ(fake_.live("qp"), 0);
}

TEST_F(EndpointPoolBurstTest, ContinuousReservations_WaitAtMostTwoMilliseconds) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<Reservation> reservations;
  while (fake_.live("qp") == 0 && std::chrono::steady_clock::now() - start < kPoolTimeout) {
    reservations.push_back(pool_->reserve(unannounced(reservations.size() + 1000)));
    pool_->poll();
  }
  EXPECT_GT(fake_.live("qp"), 0) << "new requests must not delay the first ones for ever";
}

TEST_F(EndpointPoolBurstTest, DeviceAtQpLimit_FallsBackToNativeOrder) {
  const LogCapture log;
  const Reservation reservation = pool_->reserve(unannounced(5));
  fake_.failures["create_qp"] = ENOMEM;
  std::this_thread::sleep_for(std::chrono::milliseconds(3));
  pool_->poll();
  fake_.failures.clear();
  EXPECT_EQ(take(reservation).placement().order, QpOrder::kNative);
  EXPECT_TRUE(log.warnings().empty());
}

}  // namespace
}  // namespace verbatim
