#include "wire/authentication.h"

#include <sodium.h>

#include <algorithm>
#include <bit>
#include <initializer_list>

#include "base/random.h"

namespace verbatim::wire {
namespace {

static_assert(sizeof(Key) == crypto_scalarmult_curve25519_BYTES);
static_assert(sizeof(PublicKey) == crypto_scalarmult_curve25519_BYTES);

// libsodium's manual asks for sodium_init(), which may abort the process where there is no randomness. The functions
// used here do not need it: it chooses faster implementations, and makes randomness ready.

// What a hash is for: no two of them have the same input.
enum class Purpose : std::uint8_t { kListenId = 1, kHello = 2, kSession = 3, kMac = 4, kChannel = 5 };

using Parts = std::initializer_list<std::span<const std::uint8_t>>;

template <std::size_t kBytes>
std::array<std::uint8_t, kBytes> hash(std::span<const std::uint8_t> key, Purpose purpose, Parts parts) {
  std::array<std::uint8_t, kBytes> result;
  crypto_generichash_blake2b_state state;
  crypto_generichash_blake2b_init(&state, key.data(), key.size(), result.size());
  crypto_generichash_blake2b_update(&state, reinterpret_cast<const std::uint8_t*>(&purpose), 1);
  for (const std::span<const std::uint8_t> part : parts) {
    crypto_generichash_blake2b_update(&state, part.data(), part.size());
  }
  crypto_generichash_blake2b_final(&state, result.data(), result.size());
  return result;
}

Mac make_mac(std::span<const std::uint8_t> message, const Key& key, std::span<const std::uint8_t> context) {
  return hash<kMacBytes>(key, Purpose::kMac, {message, context});
}

}  // namespace

KeyPair::~KeyPair() {
  ::sodium_memzero(own.data(), own.size());
}

Result<KeyPair> make_key_pair() {
  KeyPair made;
  if (const Status filled = fill_random(std::as_writable_bytes(std::span(made.own))); !filled) return filled.error();
  crypto_scalarmult_curve25519_base(made.sent.data(), made.own.data());
  return made;
}

ListenId listen_id(const Secret& secret) {
  return {hash<sizeof(ListenId)>(secret, Purpose::kListenId, {})};
}

Key hello_key(const Secret& secret, std::span<const std::uint8_t> psk) {
  return hash<sizeof(Key)>(secret, Purpose::kHello, {psk});
}

std::optional<Key> shared_key(const KeyPair& own, const PublicKey& peers) {
  Key shared;
  if (crypto_scalarmult_curve25519(shared.data(), own.own.data(), peers.data()) != 0) return std::nullopt;
  return shared;
}

Key session_key(const Key& hellos, const Key& shared, const Mac& hello, const Mac& reply) {
  return hash<sizeof(Key)>(hellos, Purpose::kSession, {shared, hello, reply});
}

MessageContext message_context(std::uint64_t sender, std::uint64_t sequence) {
  return std::bit_cast<MessageContext>(std::array{sender, sequence});
}

Key channel_key(const Key& session, std::uint64_t dialer, std::uint64_t number) {
  return hash<sizeof(Key)>(session, Purpose::kChannel, {message_context(dialer, number)});
}

std::vector<std::uint8_t> with_mac(std::vector<std::uint8_t> message, const Key& key,
                                   std::span<const std::uint8_t> context) {
  message.resize(message.size() + kMacBytes);
  put_mac(message, key, context);
  return message;
}

void put_mac(std::span<std::uint8_t> message, const Key& key, std::span<const std::uint8_t> context) {
  put_body_bytes(message.first<kHeaderBytes>(), message.size() - kHeaderBytes);
  std::ranges::copy(make_mac(message.first(message.size() - kMacBytes), key, context), message.last(kMacBytes).begin());
}

Mac mac_of(std::span<const std::uint8_t> message_with_mac) {
  Mac found;
  std::ranges::copy(message_with_mac.last<kMacBytes>(), found.begin());
  return found;
}

bool has_mac(std::span<const std::uint8_t> message, const Key& key, std::span<const std::uint8_t> context) {
  if (message.size() < kHeaderBytes + kMacBytes) return false;
  const Mac expected = make_mac(message.first(message.size() - kMacBytes), key, context);
  return ::sodium_memcmp(message.last(kMacBytes).data(), expected.data(), expected.size()) == 0;
}

}  // namespace verbatim::wire
