#include "net/connect/endpoint_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "hang.h"
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
      ports_[i].name = devices_[i]->name() + ":1";
    }
    make_pool();
  }

  void make_pool() {
    pool_.reset();
    pool_ = std::make_unique<EndpointPool>(config_, pools_);
  }

  static wire::PeerIdentity peer(std::uint64_t process) { return {1, process, 1, 0}; }

  EndpointRequest request(std::uint64_t process, std::size_t qps = 1) const {
    EndpointRequest request;
    request.ports = {&ports_[0]};
    request.sizes.qps = qps;
    request.self = peer(kSelf);
    request.peer = peer(process);
    request.announced = {.peers = 4, .flows = 2};
    return request;
  }

  // The same, with two flows to each of so many peers announced.
  EndpointRequest announced(std::uint64_t process, std::uint32_t peers) const {
    EndpointRequest many = request(process);
    many.announced = {.peers = peers, .flows = 2};
    return many;
  }

  // The same, with nothing announced.
  EndpointRequest unannounced(std::uint64_t process, std::size_t qps = 1) const {
    EndpointRequest unknown = request(process, qps);
    unknown.announced = {};
    return unknown;
  }

  // From communicator 25 of a process to communicator `context` of the same process.
  EndpointRequest in_process(std::uint32_t context) const {
    EndpointRequest local = request(kSelf);
    local.self.context = 25;
    local.peer.context = context;
    return local;
  }

  // Reservations of `flows` connections to each of the peers.
  std::vector<Reservation> reserve(const std::vector<EndpointRequest>& peers, int flows) {
    std::vector<Reservation> reservations;
    for (const EndpointRequest& peer : peers) {
      for (int k = 0; k < flows; ++k) reservations.push_back(pool_->reserve(peer));
    }
    return reservations;
  }

  // The QP with position p has the number of the QP with position 0, plus p.
  void expect_positions(const std::vector<Reservation>& reservations, const std::vector<std::uint32_t>& positions) {
    std::vector<Endpoint> made;
    for (const Reservation& reservation : reservations) made.push_back(take(reservation));
    expect_positions(made, positions);
  }
  // The same, and no reservation waits for the end of a burst: the block of eight QPs is created for the first one.
  void expect_positions_now(const std::vector<Reservation>& reservations, const std::vector<std::uint32_t>& positions) {
    std::vector<Endpoint> made;
    for (const Reservation& reservation : reservations) {
      std::optional<Endpoint> endpoint = take_now(reservation);
      ASSERT_TRUE(endpoint);
      EXPECT_EQ(fake_.live("qp"), 8);
      made.push_back(std::move(*endpoint));
    }
    expect_positions(made, positions);
  }
  static void expect_positions(const std::vector<Endpoint>& made, const std::vector<std::uint32_t>& positions) {
    ASSERT_EQ(made.size(), positions.size());
    for (std::size_t i = 0; i < made.size(); ++i) {
      EXPECT_EQ(made[i].placement().order, QpOrder::kStaggered);
      EXPECT_EQ(made[i].placement().position(0), positions[i]);
      EXPECT_EQ(made[i].qps()[0].qp->qp_num - positions[i], made[0].qps()[0].qp->qp_num - positions[0]);
    }
  }

  // Polls until the reservation has its endpoint.
  Endpoint take(const Reservation& reservation) { return take(*pool_, reservation); }
  static Endpoint take(EndpointPool& pool, const Reservation& reservation) {
    const auto end = std::chrono::steady_clock::now() + kPoolTimeout;
    while (true) {
      VerbBudget budget = VerbBudget::unlimited();
      Result<std::optional<Endpoint>> endpoint = pool.take(*reservation, budget);
      if (!endpoint) {
        ADD_FAILURE() << to_string(endpoint.error());
        std::abort();
      }
      if (*endpoint) return std::move(**endpoint);
      if (std::chrono::steady_clock::now() > end) std::abort();
    }
  }
  // The same, as connect and accept do it; no call may make more verbs than its budget allows.
  std::optional<Endpoint> take_in_slices(EndpointPool& pool, const Reservation& reservation) {
    const auto end = std::chrono::steady_clock::now() + kPoolTimeout;
    while (std::chrono::steady_clock::now() < end) {
      VerbBudget budget;
      const int before = verbs();
      Result<std::optional<Endpoint>> endpoint = pool.take(*reservation, budget);
      EXPECT_LE(verbs() - before, static_cast<int>(kVerbsPerCall));
      if (!endpoint) ADD_FAILURE() << to_string(endpoint.error());
      if (!endpoint || *endpoint) return endpoint ? std::move(*endpoint) : std::nullopt;
    }
    ADD_FAILURE() << "not in time";
    return std::nullopt;
  }
  int verbs() const {
    int all = 0;
    for (const char* verb : {"create_cq", "create_qp", "modify_qp", "destroy_qp", "destroy_cq"}) {
      all += fake_.calls(verb);
    }
    return all;
  }
  bool is_ready(const Reservation& reservation) { return take_now(reservation).has_value(); }
  // The endpoint, if the first call returns it: the reservation does not wait for the end of its burst.
  std::optional<Endpoint> take_now(const Reservation& reservation) {
    VerbBudget budget = VerbBudget::unlimited();
    Result<std::optional<Endpoint>> endpoint = pool_->take(*reservation, budget);
    EXPECT_TRUE(endpoint);
    return endpoint ? std::move(*endpoint) : std::nullopt;
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
  expect_positions(reserve({unannounced(200), unannounced(10), unannounced(100), unannounced(20)}, 2),
                   {1, 5, 2, 6, 0, 4, 3, 7});
}

TEST_F(EndpointPoolBurstTest, PeersWithDifferentFlows_OnlyRequestedQpsAreCreated) {
  std::vector<Endpoint> made;
  for (const auto& one : reserve({unannounced(5), unannounced(9), unannounced(9)}, 2)) made.push_back(take(one));
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
