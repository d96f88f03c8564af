#include "channel/key_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include "wire/authentication.h"

namespace verbatim {
namespace {

class KeyExchangeTest : public ::testing::Test {
 protected:
  static wire::KeyPair made() {
    const Result<wire::KeyPair> keys = wire::make_key_pair();
    EXPECT_TRUE(keys);
    return keys ? *keys : wire::KeyPair{};
  }

  const wire::Key hellos_ = wire::hello_key(wire::Secret{1, 2, 3});
  const wire::KeyPair own_ = made();
  KeyExchange keys_{own_, {}};
};

// Also the second time, when what X25519 made of the two keys is known.
TEST_F(KeyExchangeTest, ConnectionsOfTwoProcesses_HaveAKeyEachThatBothEndsKnow) {
  KeyExchange peer(made(), {});
  std::optional<wire::Key> before;
  for (std::uint8_t connection = 1; connection <= 3; ++connection) {
    const std::optional<wire::Key> session = keys_.session_key(hellos_, peer.sent(), {connection}, {0});
    ASSERT_TRUE(session);
    EXPECT_EQ(session, peer.session_key(hellos_, keys_.sent(), {connection}, {0}));
    EXPECT_NE(session, before);
    before = session;
  }
  EXPECT_EQ(keys_.kept(), 1U);
  EXPECT_EQ(peer.kept(), 1U);
}

TEST_F(KeyExchangeTest, ManyPeers_EachHasTheKeyOfItsOwn) {
  std::size_t most = 0;
  for (int peer = 0; peer < 5000; ++peer) {
    const wire::PublicKey key{9, static_cast<std::uint8_t>(peer), static_cast<std::uint8_t>(peer >> 8)};
    const std::optional<wire::Key> shared = wire::shared_key(own_, key);
    ASSERT_TRUE(shared);
    const wire::Key expected = wire::session_key(hellos_, *shared, {1}, {2});
    for (int again = 0; again < 2; ++again) {
      ASSERT_EQ(keys_.session_key(hellos_, key, {1}, {2}), expected) << peer;
    }
    most = std::max(most, keys_.kept());
  }
  EXPECT_EQ(most, 4096U);
}

TEST_F(KeyExchangeTest, PublicKeyOfLowOrder_MakesNoSessionKey) {
  for (int again = 0; again < 2; ++again) EXPECT_FALSE(keys_.session_key(hellos_, wire::PublicKey{1}, {1}, {2}));
}

TEST_F(KeyExchangeTest, KeyOfTheOperator_ChangesTheKeyOfTheHellos) {
  const std::vector<std::uint8_t> psk(32, 7);
  EXPECT_EQ(keys_.hello_key({1, 2, 3}), hellos_);
  EXPECT_NE(KeyExchange(own_, psk).hello_key({1, 2, 3}), hellos_);
}

}  // namespace
}  // namespace verbatim
