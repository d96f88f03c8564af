// The 128 bytes that listen fills and NCCL carries to the peer's connect: where to knock, the secret to show, and who
// lives there.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.h"
#include "wire/limits.h"

namespace verbatim::wire {

constexpr std::size_t kHandleBytes = 128;

using Secret = std::array<std::uint8_t, 16>;

// Who a peer is, as far as a transport can know without ranks. Equal host and process: the same process.
struct PeerIdentity {
  std::uint64_t host_id = 0;      // of the boot of a host
  std::uint64_t process_id = 0;   // random, one per load of the plugin
  std::uint64_t device_guid = 0;  // of the first device
  std::uint32_t context = 0;      // which init of that process
  std::uint32_t listen = 0;       // which listen of that context
};

struct Handle {
  std::uint16_t version = kProtocolVersion;  // of who listens
  sockaddr_storage address{};                // IPv4 or IPv6, with its port
  Secret secret{};
  PeerIdentity listener;
  std::uint8_t device_count = 1;  // 1 to kMaxDevices: the layout of CTS entries follows from it
};

void encode_handle(const Handle& handle, std::span<std::uint8_t, kHandleBytes> bytes);

// kArgument when the bytes are no handle of ours. Of another protocol version: as well as it can be read, so that both
// ends are told when they meet; nothing before the address may move.
Result<Handle> decode_handle(std::span<const std::uint8_t, kHandleBytes> bytes);

// NCCL passes the same 128 bytes to every retry of one connect, so the connecting side keeps its place there: a token
// that encode_handle sets to 0.
std::uint64_t load_connect_token(std::span<const std::uint8_t, kHandleBytes> bytes);
void store_connect_token(std::span<std::uint8_t, kHandleBytes> bytes, std::uint64_t token);

}  // namespace verbatim::wire
