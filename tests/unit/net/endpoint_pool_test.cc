#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <thread>

#include "endpoint_pool_fixture.h"

namespace verbatim {
namespace {

TEST_F(EndpointPoolTest, Reservation_FixesPositionAtFirstCall) {
  const std::vector<Reservation> reservations = reserve({request(7), request(3)}, 2);
  std::optional<Endpoint> taken = take_now(reservations[3]);
  EXPECT_EQ(fake_.live("qp"), 8) << "4 peers, 2 connections each";
  ASSERT_TRUE(taken);
  const Endpoint last = std::move(*taken);
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
  collective.announced = {.peers = 4, .flows = 3, .collective = true};
  EndpointRequest recv = request(7);
  recv.kind = CommKind::kRecv;
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
  const Endpoint native = take(pool_->reserve(request(8, 6)));
  EXPECT_EQ(native.placement().order, QpOrder::kNative) << "not even one connection";
}

TEST_F(EndpointPoolTest, DeviceAtQpLimit_FallsBackToNativeOrder) {
  const LogCapture log;
  int made = 0;
  fake_.on_create_qp = [&] { return ++made == 6 ? ENOMEM : 0; };
  const Reservation reservation = pool_->reserve(request(7));
  const Endpoint first = take(reservation);
  EXPECT_EQ(fake_.live("qp"), 1) << "an incomplete block is destroyed";
  EXPECT_EQ(made, 7);
  EXPECT_EQ(first.placement().order, QpOrder::kNative);
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

TEST_F(EndpointPoolTest, LargeUnusedBlock_IsFreedInSlices) {
  EndpointPool other(config_, pools_);
  EndpointRequest many = request(7);
  many.announced = {.peers = 50, .flows = 2};
  const Endpoint used = take(pool_->reserve(many));
  EXPECT_EQ(fake_.live("qp"), 100);
  fake_.on_create_qp = [&] { return fake_.live("qp") > 2 ? ENOMEM : 0; };
  EXPECT_TRUE(take_in_slices(other, other.reserve(unannounced(3))));
  EXPECT_EQ(fake_.live("qp"), 1);
  EXPECT_EQ(fake_.live("cq"), 1);
}

TEST_F(EndpointPoolTest, ManyReleasedReservations_AreDestroyedInSlices) {
  constexpr std::uint32_t kPeers = 40;
  std::vector<Reservation> kept;
  for (std::uint64_t process = 1000; process < 1000 + kPeers; ++process) {
    pool_->reserve(announced(process, kPeers)).reset();  // its connect failed
    kept.push_back(pool_->reserve(announced(process, kPeers)));
  }
  std::vector<std::optional<Endpoint>> made;
  for (const Reservation& reservation : kept) made.push_back(take_in_slices(*pool_, reservation));
  EXPECT_EQ(fake_.live("qp"), static_cast<int>(kPeers));
  EXPECT_EQ(fake_.live("cq"), static_cast<int>(kPeers));
}

TEST_F(EndpointPoolTest, HalfMadeBlockNoConnectionWaits_IsFreedAtQpLimit) {
  Config native;
  native.qp_order = QpOrder::kNative;
  EndpointPool other(native, pools_);
  const auto begin_block = [&] {
    EndpointRequest many = request(7);
    many.announced = {.peers = 50, .flows = 2};
    Reservation reservation = pool_->reserve(many);
    for (const int before = fake_.live("qp"); fake_.live("qp") < before + 20;) {
      VerbBudget budget;
      const Result<std::optional<Endpoint>> endpoint = pool_->take(*reservation, budget);
      EXPECT_TRUE(endpoint && !*endpoint);
    }
    return reservation;
  };
  Reservation waiting = begin_block();
  fake_.on_create_qp = [&] { return fake_.live("qp") > 1 ? ENOMEM : 0; };
  VerbBudget budget = VerbBudget::unlimited();
  EXPECT_FALSE(other.take(*other.reserve(unannounced(3)), budget)) << "the connection needs the QPs of its block";
  EXPECT_GE(fake_.live("qp"), 20);
  waiting.reset();
  EXPECT_TRUE(take_in_slices(other, other.reserve(unannounced(3))));
  EXPECT_EQ(fake_.live("qp"), 0);
  EXPECT_EQ(fake_.live("cq"), 0);
  fake_.on_create_qp = {};
  EXPECT_EQ(take(pool_->reserve(request(8))).placement().order, QpOrder::kNative) << "its block is released";
}

TEST_F(EndpointPoolTest, ListensOfOneCommunicator_AreOnePeer) {
  EndpointRequest listen = request(7);
  listen.peer.listen = 5;
  EndpointRequest other_listen = request(7);
  other_listen.peer.listen = 6;
  EndpointRequest other_communicator = request(7);
  other_communicator.peer.context = 1;
  EXPECT_EQ(take(pool_->reserve(listen)).placement().connection, 0U);
  EXPECT_EQ(take(pool_->reserve(other_listen)).placement().connection, 1U);
  EXPECT_EQ(take(pool_->reserve(other_communicator)).placement().connection, 0U);
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
    EXPECT_EQ(pool_->announced(CommKind::kSend).peers, 2U)
        << "the thread has announced nothing: the last announcement counts";
    pool_->announce({.send = {.peers = 6, .flows = 7}, .recv = {}});
    EXPECT_EQ(pool_->announced(CommKind::kSend).peers, 6U);
  }).join();
  EXPECT_EQ(pool_->announced(CommKind::kSend).flows, 3U);
  EXPECT_TRUE(pool_->announced(CommKind::kRecv).collective);
}

// The caller is rank 2 of ranks with the identities 10, 20, 25, 30 and 40.
TEST_F(EndpointPoolTest, RotatedPeersOfProcess_KeepOrderOfRequests) {
  const std::vector<Reservation> reservations =
      reserve({in_process(30), in_process(40), in_process(10), in_process(20)}, 2);
  expect_positions_now(reservations, {0, 4, 1, 5, 2, 6, 3, 7});
  pool_->reset_order();
  EXPECT_TRUE(is_ready(pool_->reserve(in_process(30)))) << "no request waits";
}

TEST_F(EndpointPoolTest, PeersOfProcessNotRotated_AreInRingOrder) {
  std::vector<Reservation> reservations = reserve({in_process(10), in_process(20), in_process(30), in_process(40)}, 1);
  EXPECT_EQ(fake_.live("qp"), 0) << "more requests are announced";
  for (const std::uint32_t context : {10U, 20U, 30U, 40U}) reservations.push_back(pool_->reserve(in_process(context)));
  expect_positions_now(reservations, {2, 3, 0, 1, 6, 7, 4, 5});  // the eighth request was the last that is announced
}

TEST_F(EndpointPoolTest, RequestShowsRotation_WaitingReservationsAreReady) {
  std::vector<Reservation> reservations = reserve({in_process(10), in_process(40)}, 1);
  EXPECT_EQ(fake_.live("qp"), 0);
  reservations.push_back(pool_->reserve(in_process(20)));
  expect_positions_now(reservations, {0, 1, 2});
}

TEST_F(EndpointPoolTest, NoFurtherPeer_WaitingReservationIsReadyAfterBurst) {
  const Endpoint first = take(pool_->reserve(in_process(10)));
  EXPECT_EQ(first.placement().position(0), 0U);
  EXPECT_EQ(take(pool_->reserve(in_process(30))).placement().position(0), 1U) << "an assigned slot does not change";
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
  // After 99 come 100, 200, 10 and 20.
  expect_positions(reserve_in_one_burst({unannounced(200), unannounced(10), unannounced(100), unannounced(20)}, 2),
                   {1, 5, 2, 6, 0, 4, 3, 7});
}

TEST_F(EndpointPoolBurstTest, PeersWithDifferentFlows_OnlyRequestedQpsAreCreated) {
  std::vector<Endpoint> made;
  for (const auto& one : reserve_in_one_burst({unannounced(5), unannounced(9), unannounced(9)}, 2)) {
    made.push_back(take(one));
  }
  EXPECT_EQ(fake_.live("qp"), 6);
  const std::uint32_t positions[] = {0, 2, 1, 3, 5, 7};
  const std::uint32_t numbers[] = {0, 2, 1, 3, 4, 5};
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
  bool ready = false;
  while (!ready && std::chrono::steady_clock::now() - start < kPoolTimeout) {
    reservations.push_back(pool_->reserve(unannounced(reservations.size() + 1000)));
    ready = is_ready(reservations.front());
  }
  EXPECT_TRUE(ready) << "new requests must not delay the first ones for ever";
}

TEST_F(EndpointPoolBurstTest, DeviceAtQpLimit_FallsBackToNativeOrder) {
  const LogCapture log;
  const Reservation reservation = pool_->reserve(unannounced(5));
  fake_.failures["create_qp"] = ENOMEM;
  std::this_thread::sleep_for(std::chrono::milliseconds(3));
  VerbBudget budget = VerbBudget::unlimited();
  EXPECT_FALSE(pool_->take(*reservation, budget));
  fake_.failures.clear();
  EXPECT_EQ(take(reservation).placement().order, QpOrder::kNative);
  EXPECT_TRUE(log.warnings().empty());
}

// Two threads, or two connections, continue the same block, each for one slice at a time.
TEST_F(EndpointPoolTest, BlockInSlices_KeepsOrder) {
  constexpr std::uint32_t kPeers = 40;
  std::vector<Reservation> reservations;
  for (std::uint64_t process = 1000; process < 1000 + kPeers; ++process) {
    for (int k = 0; k < 2; ++k) reservations.push_back(pool_->reserve(announced(process, kPeers)));
  }
  std::vector<std::optional<Endpoint>> made(reservations.size());
  std::vector<std::uint32_t> positions(reservations.size());
  for (std::uint32_t i = 0; i < positions.size(); ++i) positions[i] = i % 2 * kPeers + i / 2;
  const auto end = std::chrono::steady_clock::now() + kPoolTimeout;
  const auto poll = [&](std::size_t first) {
    for (bool all = false; !all && std::chrono::steady_clock::now() < end;) {
      all = true;
      for (std::size_t i = first; i < reservations.size(); i += 2) {
        if (made[i]) continue;
        VerbBudget budget;
        Result<std::optional<Endpoint>> endpoint = pool_->take(*reservations[i], budget);
        ASSERT_TRUE(endpoint);
        if (*endpoint) made[i] = std::move(*endpoint);
        all = all && made[i].has_value();
      }
    }
  };
  std::thread other(poll, 1);
  poll(0);
  other.join();
  std::vector<Endpoint> endpoints;
  for (std::optional<Endpoint>& one : made) {
    ASSERT_TRUE(one);
    endpoints.push_back(std::move(*one));
  }
  expect_positions(endpoints, positions);
  EXPECT_EQ(fake_.live("qp"), 2 * static_cast<int>(kPeers));
}

}  // namespace
}  // namespace verbatim
