// One end of a connection whose peer listens at two addresses. The test is the peer (one_end.h).
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "one_end.h"
#include "support/loopback.h"

namespace verbatim {

// One end, connected to QPs of another comm of this process.
class EndOfSeveralAddresses : public OneEnd {
 protected:
  static constexpr std::uint64_t kAttempt = 4711;

  void SetUp() override { start_with_addresses(0); }
  void start_with_addresses(std::size_t device) {
    ASSERT_NO_FATAL_FAILURE(start(device));
    ASSERT_TRUE(listener_->add(wire::Secret{1}));  // for attempts of the test
    Result<UniqueFd> second = tcp_listen(test::loopback(2));
    ASSERT_TRUE(second);
    second_ = std::move(*second);
  }
  void TearDown() override {
    listener_->remove(wire::listen_id({1}));
    OneEnd::TearDown();
  }

  static wire::Address address_of(const UniqueFd& listening) { return wire::to_address(*local_address(listening)); }
  wire::ConnectionEnd end() const {
    return {{wire::listen_id({1}), kAttempt}, comm_->kind() == CommKind::kSend ? 1U : 0U};
  }
  // Has TCP addresses of its own in the hello.
  wire::Hello hello_of(const Comm& peer) const {
    wire::Hello hello = peer.hello();
    hello.listen = wire::listen_id({1});
    hello.attempt = kAttempt;
    hello.addresses = {address_of(listening_), address_of(second_)};
    return hello;
  }
  void connect(Comm& comm, const Comm& peer) const {
    VerbBudget budget;
    const Result<bool> connected = comm.connect(hello_of(peer), -1, budget);
    ASSERT_TRUE(connected);
    ASSERT_TRUE(*connected);
  }
  std::unique_ptr<SendComm> make_send_comm() {
    const Config& config = link_.context().config();
    const std::size_t ports = link_.ports().size();
    Result<Endpoint> endpoint = Endpoint::create(link_.ports(), SendComm::endpoint_sizes(ports, 1, config), config);
    EXPECT_TRUE(endpoint);
    if (!endpoint) return nullptr;
    Result<std::unique_ptr<SendComm>> comm =
        SendComm::create(link_.context().comm_settings(), std::move(*endpoint), ports);
    EXPECT_TRUE(comm);
    return comm ? std::move(*comm) : nullptr;
  }
  void watch_one(CommKind kind) {
    std::unique_ptr<Comm> sender = make_send_comm();
    std::unique_ptr<Comm> receiver = link_.make_recv_comm(link_.ports(), link_.ports().size());
    ASSERT_TRUE(sender != nullptr && receiver != nullptr);
    if (kind == CommKind::kRecv) std::swap(sender, receiver);
    connect(*sender, *receiver);
    other_ = std::move(receiver);
    watch(std::move(sender));
  }
  void answer(test::PeerSocket& attempt) {
    ASSERT_NO_FATAL_FAILURE(say(attempt, wire::Notice::ack({0, 0})));
    ASSERT_NO_FATAL_FAILURE(say(attempt, wire::MessageType::kPing));
    ASSERT_EQ(next(attempt), wire::MessageType::kPong);
  }

  // Both ends make the side channel again: this one, which has sent kResume, and the peer.
  struct BothAttempts {
    test::PeerSocket own;
    test::PeerSocket of_peer;
  };
  BothAttempts make_both() {
    peer_.close_with_reset();
    BothAttempts both;
    both.own = asked();
    both.of_peer = resume(*listener_->add(wire::Secret{1}), end());
    return both;
  }

  UniqueFd second_;              // the peer listens here, too
  std::unique_ptr<Comm> other_;  // whose QPs those of comm_ are connected to
};

}  // namespace verbatim
