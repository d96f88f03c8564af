#include "wire/authentication.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "wire/handshake.h"

namespace verbatim::wire {
namespace {

constexpr Secret kSecret{1, 2, 3};

KeyPair made() {
  const Result<KeyPair> keys = make_key_pair();
  EXPECT_TRUE(keys);
  return keys ? *keys : KeyPair{};
}

Key shared_by(const KeyPair& own, const KeyPair& peer) {
  const std::optional<Key> shared = shared_key(own, peer.sent);
  EXPECT_TRUE(shared);
  return shared.value_or(Key{});
}

TEST(Authentication, SharedKey_IsTheSameAtBothEndsAndThereOnly) {
  const KeyPair connecting = made();
  const KeyPair accepting = made();
  const Key shared = shared_by(connecting, accepting);
  EXPECT_EQ(shared, shared_by(accepting, connecting));
  EXPECT_NE(shared, shared_by(made(), accepting));
  EXPECT_NE(shared, shared_by(connecting, made()));
}

// All know what X25519 makes of such a key.
TEST(Authentication, PublicKeyOfLowOrder_MakesNoSharedKey) {
  for (const PublicKey& low : {PublicKey{}, PublicKey{1}}) EXPECT_FALSE(shared_key(made(), low));
}

TEST(Authentication, SessionKey_DependsOnSecretKeysAndHellos) {
  const Key shared = shared_by(made(), made());
  const Key key = hello_key(kSecret);
  const Key one = session_key(key, shared, Mac{1}, Mac{2});
  EXPECT_EQ(one, session_key(key, shared, Mac{1}, Mac{2}));
  EXPECT_NE(one, session_key(hello_key(Secret{1, 2, 4}), shared, Mac{1}, Mac{2}));
  EXPECT_NE(one, session_key(key, shared_by(made(), made()), Mac{1}, Mac{2}));
  EXPECT_NE(one, session_key(key, shared, Mac{3}, Mac{2}));
  EXPECT_NE(one, session_key(key, shared, Mac{1}, Mac{3}));
  EXPECT_NE(one, session_key(key, shared, Mac{2}, Mac{1}));
}

TEST(Authentication, ChannelKey_IsAnotherForEachTcpConnection) {
  const Key key = channel_key(Key{1}, 1, 0);
  EXPECT_EQ(key, channel_key(Key{1}, 1, 0));
  EXPECT_NE(key, channel_key(Key{2}, 1, 0));
  EXPECT_NE(key, channel_key(Key{1}, 0, 0));
  EXPECT_NE(key, channel_key(Key{1}, 1, 1));
}

TEST(Authentication, MessageContext_IsAnotherForEachSenderAndMessage) {
  EXPECT_EQ(message_context(1, 2), message_context(1, 2));
  EXPECT_NE(message_context(1, 2), message_context(0, 2));
  EXPECT_NE(message_context(1, 2), message_context(1, 3));
}

TEST(Authentication, HelloKey_IsAnotherForEachSecretAndOperatorsKey) {
  const std::vector<std::uint8_t> psk(16, 1);
  const std::vector<std::uint8_t> other(17, 1);
  EXPECT_EQ(hello_key(kSecret, psk), hello_key(kSecret, psk));
  EXPECT_NE(hello_key(kSecret, psk), hello_key(kSecret));
  EXPECT_NE(hello_key(kSecret, psk), hello_key(kSecret, other));
  EXPECT_NE(hello_key(kSecret, psk), hello_key(Secret{1}, psk));
}

TEST(Authentication, ListenId_IsAnotherForEachSecret) {
  EXPECT_EQ(listen_id(kSecret), listen_id(kSecret));
  EXPECT_NE(listen_id(kSecret), listen_id(Secret{1, 2, 4}));
  EXPECT_NE(listen_id(kSecret).bytes, kSecret);
}

TEST(Authentication, MessageWithMac_HasItsLengthInTheHeader) {
  const std::vector<std::uint8_t> message = with_mac(encode_ready(), hello_key(kSecret));
  const Result<Header> header = decode_header(std::span(message).first<kHeaderBytes>());
  ASSERT_TRUE(header);
  EXPECT_EQ(header->type, MessageType::kReady);
  EXPECT_EQ(header->body_bytes, kMacBytes);
  EXPECT_EQ(message.size(), kHeaderBytes + kMacBytes);
}

TEST(Authentication, Mac_IsThatOfMessageKeyAndContext) {
  const Key key = hello_key(kSecret);
  const Mac context{7};
  const std::vector<std::uint8_t> message = with_mac(encode_reject("text"), key, context);
  EXPECT_TRUE(has_mac(message, key, context));
  EXPECT_FALSE(has_mac(message, key));
  EXPECT_FALSE(has_mac(message, key, Mac{8}));
  EXPECT_FALSE(has_mac(message, hello_key(Secret{})));
  for (std::size_t i = 0; i < message.size(); ++i) {
    std::vector<std::uint8_t> changed = message;
    changed[i] ^= 0x10;
    EXPECT_FALSE(has_mac(changed, key, context)) << i;
    EXPECT_FALSE(has_mac(std::span(message).first(i), key, context)) << i;
  }
}

}  // namespace
}  // namespace verbatim::wire
