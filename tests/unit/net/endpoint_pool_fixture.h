// Two devices of fake verbs, and a pool of endpoints on them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "net/connect/endpoint_pool.h"
#include "unit/support/fake_verbs.h"
#include "unit/support/log_capture.h"

namespace verbatim {

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

  // The same, in one burst, which lasts two milliseconds: on a busy machine a thread may have to begin anew.
  std::vector<Reservation> reserve_in_one_burst(const std::vector<EndpointRequest>& peers, int flows) {
    while (true) {
      const auto start = std::chrono::steady_clock::now();
      std::vector<Reservation> reservations = reserve(peers, flows);
      if (std::chrono::steady_clock::now() - start < std::chrono::milliseconds(1)) return reservations;
      reservations.clear();
      make_pool();
    }
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

inline std::uint32_t number(const Endpoint& endpoint, std::size_t qp = 0) {
  return endpoint.qps()[qp].qp->qp_num;
}

}  // namespace verbatim
