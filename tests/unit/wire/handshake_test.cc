#include "wire/handshake.h"

#include <gtest/gtest.h>

#include "wire/authentication.h"
#include "wire/limits.h"

namespace verbatim::wire {
namespace {

Hello example(std::size_t devices, std::size_t qps) {
  Hello hello;
  hello.listen.bytes.fill(0x5a);
  hello.key.fill(0xa5);
  hello.identity = {1, 2, 3, 4, 5};
  hello.attempt = 6;
  hello.control_address = 0x7f0012345678;
  hello.traffic_class = 104;
  hello.host = "node17";
  hello.pid = 4711;
  for (std::size_t i = 0; i < devices; ++i) hello.addresses.push_back({{1, 2, 3}, static_cast<std::uint16_t>(i)});
  for (std::size_t i = 0; i < devices; ++i) {
    HelloDevice device;
    device.gid.fill(static_cast<std::uint8_t>(i));
    device.control_rkey = static_cast<std::uint32_t>(200 + i);
    device.max_message_bytes = 1U << 30;
    device.speed_mbps = 400'000;
    device.lid = static_cast<std::uint16_t>(300 + i);
    device.link_layer = 2;
    device.mtu = 5;
    device.port = 1;
    device.gid_index = 3;
    device.name = "mlx5_" + std::to_string(i);
    hello.devices.push_back(device);
  }
  for (std::size_t i = 0; i < qps; ++i) {
    HelloQp qp;
    qp.number = static_cast<std::uint32_t>(0x1000 + i);
    qp.device = static_cast<std::uint8_t>(i % devices);
    qp.has_ece = i % 2 == 1;
    if (qp.has_ece) qp.ece = {0x15b3, 7, 1};
    hello.qps.push_back(qp);
  }
  return hello;
}

std::span<const std::uint8_t, kHeaderBytes> header_of(const std::vector<std::uint8_t>& message) {
  return std::span<const std::uint8_t, kHeaderBytes>(message.data(), kHeaderBytes);
}

std::span<const std::uint8_t> body_of(const std::vector<std::uint8_t>& message) {
  return std::span(message).subspan(kHeaderBytes);
}

TEST(Hello, EveryField_RoundTrips) {
  for (const auto& [devices, qps] : {std::pair<std::size_t, std::size_t>{1, 1}, {2, 4}, {kMaxDevices, kMaxQps}}) {
    const Hello hello = example(devices, qps);
    const std::vector<std::uint8_t> message = encode_hello(MessageType::kAccept, hello);
    const Result<Header> header = decode_header(header_of(message));
    ASSERT_TRUE(header);
    EXPECT_EQ(header->type, MessageType::kAccept);
    ASSERT_EQ(header->body_bytes, message.size() - kHeaderBytes);
    EXPECT_LE(header->body_bytes, kMaxBodyBytes);

    const Result<Hello> decoded = decode_hello(body_of(message));
    ASSERT_TRUE(decoded);
    EXPECT_EQ(decoded->listen, hello.listen);
    EXPECT_EQ(decoded->key, hello.key);
    EXPECT_EQ(decoded->identity.listen, 5U);
    EXPECT_EQ(decoded->attempt, hello.attempt);
    EXPECT_EQ(decoded->control_address, hello.control_address);
    EXPECT_EQ(decoded->addresses, hello.addresses);
    EXPECT_EQ(decoded->traffic_class, 104);
    EXPECT_EQ(decoded->host, "node17");
    EXPECT_EQ(decoded->pid, 4711U);
    ASSERT_EQ(decoded->devices.size(), devices);
    EXPECT_EQ(decoded->devices.back().gid, hello.devices.back().gid);
    EXPECT_EQ(decoded->devices.back().control_rkey, hello.devices.back().control_rkey);
    EXPECT_EQ(decoded->devices.back().speed_mbps, 400'000U);
    EXPECT_EQ(decoded->devices.back().name, hello.devices.back().name);
    ASSERT_EQ(decoded->qps.size(), qps);
    for (std::size_t i = 0; i < qps; ++i) {
      EXPECT_EQ(decoded->qps[i].number, hello.qps[i].number);
      EXPECT_EQ(decoded->qps[i].device, hello.qps[i].device);
      EXPECT_EQ(decoded->qps[i].has_ece, hello.qps[i].has_ece);
      EXPECT_EQ(decoded->qps[i].ece, hello.qps[i].ece);
    }
  }
}

TEST(Hello, LongestHello_FitsLimit) {
  Hello hello = example(kMaxDevices, kMaxQps);
  hello.host = std::string(255, 'h');
  for (HelloDevice& device : hello.devices) device.name = std::string(255, 'd');
  for (HelloQp& qp : hello.qps) qp.has_ece = true;
  EXPECT_LE(encode_hello(MessageType::kConnect, hello).size() - kHeaderBytes + kMacBytes, kMaxBodyBytes);
}

TEST(Hello, TruncatedHello_IsRejected) {
  const std::vector<std::uint8_t> message = encode_hello(MessageType::kConnect, example(2, 3));
  for (std::size_t bytes = 0; bytes < message.size() - kHeaderBytes; ++bytes) {
    EXPECT_FALSE(decode_hello(body_of(message).first(bytes))) << bytes;
  }
}

TEST(Hello, ImpossibleFields_AreRejected) {
  const auto refused = [](auto change) {
    Hello hello = example(2, 2);
    change(hello);
    const std::vector<std::uint8_t> message = encode_hello(MessageType::kConnect, hello);
    return !decode_hello(body_of(message));
  };
  EXPECT_FALSE(refused([](Hello&) {}));
  EXPECT_TRUE(refused([](Hello& hello) { hello.traffic_class = 256; }));
  EXPECT_TRUE(refused([](Hello& hello) { hello.addresses.resize(kMaxAddresses + 1); }));
  EXPECT_TRUE(refused([](Hello& hello) { hello.devices.clear(); }));
  EXPECT_TRUE(refused([](Hello& hello) { hello.devices.resize(kMaxDevices + 1, hello.devices[0]); }));
  EXPECT_TRUE(refused([](Hello& hello) { hello.qps.clear(); }));
  EXPECT_TRUE(refused([](Hello& hello) { hello.qps.resize(kMaxQps + 1, hello.qps[0]); }));
  EXPECT_TRUE(refused([](Hello& hello) { hello.qps[1].device = 2; }));
  EXPECT_TRUE(refused([](Hello& hello) { hello.devices[0].max_message_bytes = 0; }));
  EXPECT_TRUE(refused([](Hello& hello) { hello.devices[0].speed_mbps = 0; }));
  EXPECT_TRUE(refused([](Hello& hello) { hello.devices[1].mtu = 6; }));
  EXPECT_TRUE(refused([](Hello& hello) { hello.devices[1].mtu = 0; }));
}

TEST(Hello, ForeignHeader_IsRejected) {
  std::vector<std::uint8_t> message = encode_ready();
  ASSERT_EQ(message.size(), kHeaderBytes);
  EXPECT_EQ(decode_header(header_of(message))->type, MessageType::kReady);

  std::vector<std::uint8_t> other_version = message;
  ++other_version[4];
  EXPECT_EQ(decode_header(header_of(other_version)).error().kind, ErrorKind::kUsage);

  std::vector<std::uint8_t> huge = message;
  huge[10] = 0xff;
  EXPECT_EQ(decode_header(header_of(huge)).error().kind, ErrorKind::kArgument);

  const std::string http = "GET / HTTP/1.1\r\n";
  EXPECT_FALSE(decode_header(header_of(std::vector<std::uint8_t>(http.begin(), http.end()))));
}

TEST(Hello, Reject_RoundTripsReason) {
  const std::vector<std::uint8_t> message = encode_reject("ibv_create_qp: Cannot allocate memory");
  EXPECT_EQ(decode_header(header_of(message))->type, MessageType::kReject);
  EXPECT_EQ(decode_reject(body_of(message)), "ibv_create_qp: Cannot allocate memory");
}

}  // namespace
}  // namespace verbatim::wire
