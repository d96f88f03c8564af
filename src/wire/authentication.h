// How the two ends of a connection prove to each other that they know the secret of a listen, without sending it. A
// hello names the listen by a hash of its secret, and ends with a MAC, whose key follows from the secret. The MAC of
// the reply includes that of the hello: a recorded reply fits no other hello. Each hello has the public key of its
// process. The private key of one end and the public key of the other, the key of the hellos and their MACs make the
// session key, which kReady and kResume show: a process that sends a recorded hello cannot do so. What crosses the
// network is not enough to compute the session key, also for a process that learns the secret later, and no two
// connections have the same one: each hello has another attempt number, and a listen accepts a hello once. From the
// session key follows a key for each TCP connection of the side channel: the MACs of the messages there show the sender
// and their order.
//
// X25519 (RFC 7748) and BLAKE2b with a key (RFC 7693), of libsodium.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/result.h"
#include "wire/handle.h"
#include "wire/handshake.h"

namespace verbatim::wire {

using Key = std::array<std::uint8_t, 32>;
constexpr std::size_t kMacBytes = 16;
using Mac = std::array<std::uint8_t, kMacBytes>;

struct KeyPair {
  ~KeyPair();  // leaves nothing of `own` in memory
  Key own{};   // not sent
  PublicKey sent{};
};

// An error has been logged.
Result<KeyPair> make_key_pair();

// Under which name peers ask for the listen.
ListenId listen_id(const Secret& secret);
// For the MACs of the hellos. `psk`: the key that the operator gives to all hosts; empty: none.
Key hello_key(const Secret& secret, std::span<const std::uint8_t> psk = {});
// What only the two processes can compute. nullopt: the peer's public key is of low order.
std::optional<Key> shared_key(const KeyPair& own, const PublicKey& peers);
// `hello`, `reply`: their MACs.
Key session_key(const Key& hellos, const Key& shared, const Mac& hello, const Mac& reply);
// For the messages on one TCP connection of a side channel. `dialer`: the end that has made it, 1 or 0 as in
// ConnectionEnd::connecting. `number`: of its kResume; 0: it is that of the handshake.
Key channel_key(const Key& session, std::uint64_t dialer, std::uint64_t number);
// Of the MAC of such a message. `sender`: as `dialer`. `sequence`: how many messages it has sent before on this TCP
// connection.
using MessageContext = std::array<std::uint8_t, 16>;
MessageContext message_context(std::uint64_t sender, std::uint64_t sequence);

// `message` with a MAC behind it, which the header counts. The MAC includes `context`, which both ends know.
std::vector<std::uint8_t> with_mac(std::vector<std::uint8_t> message, const Key& key,
                                   std::span<const std::uint8_t> context = {});
Mac mac_of(std::span<const std::uint8_t> message_with_mac);
// The same in place: `message` ends with room for the MAC.
void put_mac(std::span<std::uint8_t> message, const Key& key, std::span<const std::uint8_t> context = {});
// Whether the MAC at the end of `message` is that of `key`.
bool has_mac(std::span<const std::uint8_t> message, const Key& key, std::span<const std::uint8_t> context = {});

}  // namespace verbatim::wire
