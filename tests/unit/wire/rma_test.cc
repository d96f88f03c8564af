#include "wire/rma.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace verbatim::wire {
namespace {

std::span<const std::uint8_t> rma_body(const std::vector<std::uint8_t>& message) {
  return std::span(message).subspan(kHeaderBytes);
}

RmaOffer sample_offer() {
  RmaOffer offer;
  offer.contexts = 2;
  offer.rank_stride = 4;
  offer.psn = 0xabcdef;
  for (const std::uint8_t port : {std::uint8_t{1}, std::uint8_t{2}}) {
    RmaOfferedLane& lane = offer.lanes.emplace_back();
    lane.roce_version = 2;
    lane.device.max_message_bytes = 4096;
    lane.device.speed_mbps = 100'000;
    lane.device.mtu = 5;
    lane.device.lid = 7;
    lane.device.port = port;
    lane.device.name = "mlx5_0";
    lane.qps = {{.number = 100U * port}, {.number = 100U * port + 1, .has_ece = true, .ece = {1, 2, 3}}};
  }
  return offer;
}

TEST(RmaMessages, Hello_IsReadAsItWasWritten) {
  RmaHello hello{
      .ranks = 8, .rank = 3, .pid = 4711, .host = "node1", .addresses = {{.ip = {1, 2}, .port = 3}, {.port = 4}}};
  hello.listen.bytes[5] = 9;
  hello.attempt = 17;
  hello.key = {3, 1};
  const std::vector<std::uint8_t> message = encode_rma_hello(MessageType::kAccept, hello);
  const Result<Header> header = decode_header(std::span(message).first<kHeaderBytes>());
  ASSERT_TRUE(header);
  EXPECT_EQ(header->type, MessageType::kAccept);
  EXPECT_EQ(header->body_bytes, message.size() - kHeaderBytes);
  const Result<RmaHello> read = decode_rma_hello(rma_body(message));
  ASSERT_TRUE(read);
  EXPECT_EQ(decode_connection_id(rma_body(message)), (ConnectionId{hello.listen, 17}));
  EXPECT_EQ(read->listen, hello.listen);
  EXPECT_EQ(read->attempt, 17U);
  EXPECT_EQ(read->key, hello.key);
  EXPECT_EQ(read->ranks, 8U);
  EXPECT_EQ(read->rank, 3U);
  EXPECT_EQ(read->pid, 4711U);
  EXPECT_EQ(read->host, "node1");
  EXPECT_EQ(read->addresses, hello.addresses);
  const std::span<const std::uint8_t> body = rma_body(message);
  for (std::size_t bytes = 0; bytes < body.size(); ++bytes) EXPECT_FALSE(decode_rma_hello(body.first(bytes)));
  hello.addresses.resize(kMaxAddresses + 1);
  EXPECT_FALSE(decode_rma_hello(rma_body(encode_rma_hello(MessageType::kAccept, hello))));
}

TEST(RmaMessages, HelloOfImpossibleRank_IsRefused) {
  const auto message = encode_rma_hello(MessageType::kConnect, {.ranks = 8, .rank = 8, .pid = 1, .host = "node1"});
  EXPECT_FALSE(decode_rma_hello(rma_body(message)));
}

TEST(RmaMessages, ExchangeWithOffer_IsReadAsItWasWritten) {
  const RmaOffer offer = sample_offer();
  const auto message = encode_rma_exchange({RmaCall::kOffer, RmaOutcome::kDone, 17, encode_rma_offer(offer)});
  const Result<RmaExchange> exchange = decode_rma_exchange(rma_body(message));
  ASSERT_TRUE(exchange);
  EXPECT_EQ(exchange->call, RmaCall::kOffer);
  EXPECT_EQ(exchange->outcome, RmaOutcome::kDone);
  EXPECT_EQ(exchange->sequence, 17U);
  const Result<RmaOffer> read = decode_rma_offer(exchange->body);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->contexts, 2U);
  EXPECT_EQ(read->rank_stride, 4U);
  EXPECT_EQ(read->psn, 0xabcdefU);
  ASSERT_EQ(read->lanes.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    const RmaOfferedLane& lane = read->lanes[i];
    EXPECT_EQ(lane.device.name, "mlx5_0");
    EXPECT_EQ(lane.device.lid, 7);
    EXPECT_EQ(lane.device.port, i + 1);
    ASSERT_EQ(lane.qps.size(), 2U);
    EXPECT_EQ(lane.qps[0].number, 100U * (i + 1));
    EXPECT_FALSE(lane.qps[0].has_ece);
    EXPECT_EQ(lane.qps[1].ece, (std::array<std::uint32_t, 3>{1, 2, 3}));
  }
}

TEST(RmaMessages, OfferThatContradictsItself_IsRefused) {
  RmaOffer offer = sample_offer();
  offer.contexts = 3;
  EXPECT_FALSE(decode_rma_offer(encode_rma_offer(offer)));
  offer = sample_offer();
  offer.psn = 1 << 24;
  EXPECT_FALSE(decode_rma_offer(encode_rma_offer(offer)));
  offer = sample_offer();
  offer.lanes[1].device.mtu = 6;
  EXPECT_FALSE(decode_rma_offer(encode_rma_offer(offer)));
  offer = sample_offer();
  offer.lanes[0].roce_version = 3;
  EXPECT_FALSE(decode_rma_offer(encode_rma_offer(offer)));
  offer = sample_offer();
  offer.lanes.resize(kMaxRmaPorts + 1, offer.lanes.front());
  EXPECT_FALSE(decode_rma_offer(encode_rma_offer(offer)));
}

TEST(RmaMessages, RegistrationThatWraps_IsRefused) {
  EXPECT_TRUE(decode_rma_registration(encode_rma_registration({.address = 4096, .bytes = 64, .rkeys = {1, 2}})));
  EXPECT_FALSE(
      decode_rma_registration(encode_rma_registration({.address = ~std::uint64_t{0}, .bytes = 2, .rkeys = {1}})));
}

TEST(RmaMessages, RegistrationWithoutKeys_IsRefused) {
  EXPECT_FALSE(decode_rma_registration(encode_rma_registration({.address = 4096, .bytes = 64, .rkeys = {}})));
}

TEST(RmaMessages, Lane_IsReadAsItWasWritten) {
  const auto message = encode_rma_lane({.step = RmaLaneStep::kOffered,
                                        .set = 3,
                                        .lane = 1,
                                        .round = 5,
                                        .psns = {7, kNoPsn},
                                        .lid = 9,
                                        .gid = {1, 2, 3}});
  EXPECT_EQ(decode_header(std::span(message).first<kHeaderBytes>())->type, MessageType::kRmaLane);
  const Result<RmaLane> read = decode_rma_lane(rma_body(message));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->step, RmaLaneStep::kOffered);
  EXPECT_EQ(read->round, 5U);
  EXPECT_EQ(read->lid, 9U);
  EXPECT_EQ(read->gid[2], 3U);
  EXPECT_EQ(read->set, 3U);
  EXPECT_EQ(read->lane, 1U);
  EXPECT_EQ(read->psns, (std::vector<std::uint32_t>{7, kNoPsn}));
  const std::span<const std::uint8_t> body = rma_body(message);
  for (std::size_t bytes = 0; bytes < body.size(); ++bytes) EXPECT_FALSE(decode_rma_lane(body.first(bytes)));
  std::vector<std::uint8_t> unknown(body.begin(), body.end());
  unknown[0] = 3;
  EXPECT_FALSE(decode_rma_lane(unknown));
}

// What is cut or changed is refused, or read without reaching beyond its end.
TEST(RmaMessages, DamagedBodies_AreNotReadBeyondTheirEnd) {
  const std::vector<std::uint8_t> body = encode_rma_offer(sample_offer());
  for (std::size_t bytes = 0; bytes < body.size(); ++bytes) {
    const std::vector<std::uint8_t> cut(body.begin(), body.begin() + static_cast<std::ptrdiff_t>(bytes));
    EXPECT_FALSE(decode_rma_offer(cut)) << bytes;
    EXPECT_FALSE(decode_rma_hello(cut) && bytes < 32) << bytes;
  }
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    std::vector<std::uint8_t> changed = body;
    for (int j = 0; j < 3; ++j) changed[random() % changed.size()] = static_cast<std::uint8_t>(random());
    const Result<RmaOffer> read = decode_rma_offer(changed);
    if (read) {
      for (const RmaOfferedLane& lane : read->lanes) EXPECT_EQ(lane.qps.size(), read->contexts);
    }
    static_cast<void>(decode_rma_exchange(changed));
    static_cast<void>(decode_rma_registration(changed));
  }
}

}  // namespace
}  // namespace verbatim::wire
