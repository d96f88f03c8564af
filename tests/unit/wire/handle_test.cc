#include "wire/handle.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <cstring>

#include "wire/limits.h"

namespace verbatim::wire {
namespace {

using HandleBytes = std::array<std::uint8_t, kHandleBytes>;

Handle example(bool ipv6) {
  Handle handle;
  if (ipv6) {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(handle.address);
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(4711);
    v6.sin6_scope_id = 3;
    ::inet_pton(AF_INET6, "fe80::1234", &v6.sin6_addr);
  } else {
    auto& v4 = reinterpret_cast<sockaddr_in&>(handle.address);
    v4.sin_family = AF_INET;
    v4.sin_port = htons(4711);
    ::inet_pton(AF_INET, "10.1.2.3", &v4.sin_addr);
  }
  for (std::size_t i = 0; i < handle.secret.size(); ++i) handle.secret[i] = static_cast<std::uint8_t>(i + 1);
  handle.listener = {11, 22, 33, 44, 55};
  handle.device_count = 2;
  return handle;
}

TEST(Handle, EveryField_RoundTrips) {
  for (const bool ipv6 : {false, true}) {
    const Handle handle = example(ipv6);
    HandleBytes bytes{};
    encode_handle(handle, bytes);
    const Result<Handle> decoded = decode_handle(bytes);
    ASSERT_TRUE(decoded);
    EXPECT_EQ(std::memcmp(&decoded->address, &handle.address, sizeof handle.address), 0);
    EXPECT_EQ(decoded->secret, handle.secret);
    EXPECT_EQ(decoded->listener.host_id, 11U);
    EXPECT_EQ(decoded->listener.process_id, 22U);
    EXPECT_EQ(decoded->listener.device_guid, 33U);
    EXPECT_EQ(decoded->listener.context, 44U);
    EXPECT_EQ(decoded->listener.listen, 55U);
    EXPECT_EQ(decoded->device_count, 2);
  }
}

TEST(Handle, ConnectToken_LeavesOtherFieldsUnchanged) {
  HandleBytes bytes{};
  encode_handle(example(true), bytes);
  EXPECT_EQ(load_connect_token(bytes), 0U);
  store_connect_token(bytes, 0xfeedfacecafebeef);
  EXPECT_EQ(load_connect_token(bytes), 0xfeedfacecafebeefU);
  const Result<Handle> decoded = decode_handle(bytes);
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->secret, example(true).secret);
  EXPECT_EQ(decoded->listener.listen, 55U);
}

// So that connect can reach the listener and both ends log the version mismatch.
TEST(Handle, OtherVersion_IsReadUpToAddress) {
  HandleBytes bytes{};
  encode_handle(example(false), bytes);
  ++bytes[4];
  bytes[6] = 0;  // the device count of this version; the other version can use the byte differently
  const Result<Handle> decoded = decode_handle(bytes);
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->version, kProtocolVersion + 1);
  EXPECT_EQ(decoded->device_count, 1U);
  const Handle original = example(false);
  EXPECT_EQ(std::memcmp(&decoded->address, &original.address, sizeof(sockaddr_in)), 0);
}

TEST(Handle, ForeignBytes_AreRejected) {
  HandleBytes bytes{};
  EXPECT_FALSE(decode_handle(bytes));
  encode_handle(example(false), bytes);

  HandleBytes other_magic = bytes;
  other_magic[0] ^= 1;
  EXPECT_EQ(decode_handle(other_magic).error().kind, ErrorKind::kArgument);

  HandleBytes no_device = bytes;
  no_device[6] = 0;
  EXPECT_FALSE(decode_handle(no_device));
  no_device[6] = kMaxDevices + 1;
  EXPECT_FALSE(decode_handle(no_device));
}

}  // namespace
}  // namespace verbatim::wire
