// The 128-byte handle that listen fills and NCCL passes to the peer's connect: address, secret and identity of the
// listen comm.
#pragma once

#include <sys/socket.h>

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.h"
#include "wire/limits.h"

namespace verbatim::wire {

constexpr std::size_t kHandleBytes = 128;

using Secret = std::array<std::uint8_t, 16>;
using PublicKey = std::array<std::uint8_t, 32>;

// Names a listen: a hash of its secret.
struct ListenId {
  std::array<std::uint8_t, 16> bytes{};

  auto operator<=>(const ListenId&) const = default;
};

// Identifies a peer, because the net interface does not pass ranks. Equal host_id and process_id mean the same process.
struct PeerIdentity {
  std::uint64_t host_id = 0;      // of the host since its last boot
  std::uint64_t process_id = 0;   // random number, one for each load of the plugin
  std::uint64_t device_guid = 0;  // of the first device
  std::uint32_t context = 0;      // number of the context in its process
  std::uint32_t listen = 0;       // number of the listen comm in its context

  auto operator<=>(const PeerIdentity&) const = default;
};
static_assert(sizeof(PeerIdentity) == 32);  // no padding: messages have the whole structure

struct Handle {
  std::uint16_t version = kProtocolVersion;  // of the listening side
  sockaddr_storage address{};                // IPv4 or IPv6, with its port
  Secret secret{};
  PeerIdentity listener;
  std::uint8_t device_count = 1;  // of the listening side, 1 to kMaxDevices; determines the layout of CTS entries
};

void encode_handle(const Handle& handle, std::span<std::uint8_t, kHandleBytes> bytes);

// kArgument when the bytes are not a handle of this plugin. A handle of another protocol version is decoded too, so
// that connect reaches the listener and both ends log the versions. All versions must keep the offsets of the fields.
Result<Handle> decode_handle(std::span<const std::uint8_t, kHandleBytes> bytes);

// NCCL passes the same 128 bytes to each retry of one connect. The connecting side stores a token there to find its
// connector again. encode_handle sets the token to 0.
std::uint64_t load_connect_token(std::span<const std::uint8_t, kHandleBytes> bytes);
void store_connect_token(std::span<std::uint8_t, kHandleBytes> bytes, std::uint64_t token);

}  // namespace verbatim::wire
