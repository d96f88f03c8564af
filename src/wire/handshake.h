// The conversation over the side channel that makes a connection:
//
//   connecting side                      accepting side
//        | ---- kConnect: secret, ... ------> |    finds the listen by the secret, creates its QPs, moves them to RTS
//        | <--- kAccept: ... ---------------- |
//    RTS | ---- kReady ---------------------> |    the receiver may write its first CTS
//
// Every message starts with the same header. kReject ends the conversation and says why. What the two tell each other
// from then on is in wire/notice.h; each side closes in peace with kBye.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "wire/handle.h"
#include "wire/limits.h"

namespace verbatim::wire {

enum class MessageType : std::uint16_t {
  kConnect = 1,
  kAccept = 2,
  kReady = 3,
  kReject = 4,
  kClose = 5,
  kFailed = 6,
  kPing = 7,
  kPong = 8,
  kStatusQuery = 9,
  kStatusReply = 10,
};

struct Header {
  std::uint32_t magic;
  std::uint16_t version;
  MessageType type;
  std::uint32_t body_bytes;
};
constexpr std::size_t kHeaderBytes = 12;
constexpr std::size_t kMaxBodyBytes = 8192;  // more than any Hello needs; a longer one is no peer of ours

// Connecting side: what it could do and wants. Accepting side: what it does of that.
enum Capability : std::uint32_t { kAtomicCompletion = 0x1 };

// One device of an end, as its peer must know it.
struct HelloDevice {
  std::uint64_t guid = 0;
  std::array<std::uint8_t, 16> gid{};
  std::uint32_t control_rkey = 0;  // key of the end's control memory on this device
  std::uint32_t max_message_bytes = 0;
  std::uint16_t lid = 0;
  std::uint8_t link_layer = 0;  // IBV_LINK_LAYER_*
  std::uint8_t mtu = 0;         // enum ibv_mtu: of the active port
  std::uint8_t port = 0;
  std::uint8_t gid_index = 0;
  std::uint8_t responder_reads = 0;  // READs and atomics at a time that its QPs answer
  std::string name;                  // of the verbs device, for people
};

struct HelloQp {
  std::uint32_t number = 0;
  std::uint8_t device = 0;  // index into Hello::devices
  bool has_ece = false;
  std::array<std::uint32_t, 3> ece{};  // vendor_id, options, comp_mask
};

// What each end tells the other.
struct Hello {
  Secret secret{};  // of the listen: proof that the handle was really handed over
  PeerIdentity identity;
  std::uint64_t attempt = 0;          // connecting side: random, of this connect; a second hello with it is a replay
  std::uint64_t control_address = 0;  // connecting side: its CTS ring; accepting side: its CompletionRecord
  std::uint32_t capabilities = 0;     // Capability bits; the accepting side's are those that hold
  std::int16_t traffic_class = -1;    // connecting side: of the communicator, -1 when it has none
  std::string host;                   // for people
  std::uint32_t pid = 0;              // likewise
  std::vector<HelloDevice> devices;   // 1 to kMaxDevices
  std::vector<HelloQp> qps;           // 1 to kMaxQps; both ends' QPs of equal index are connected
};

std::vector<std::uint8_t> encode_hello(MessageType type, const Hello& hello);
std::vector<std::uint8_t> encode_ready();
std::vector<std::uint8_t> encode_reject(const std::string& reason, std::uint16_t version = kProtocolVersion);

void put_header(std::span<std::uint8_t, kHeaderBytes> bytes, MessageType type, std::uint32_t body_bytes);

// The sender's, also where it is not ours.
std::uint16_t protocol_version(std::span<const std::uint8_t, kHeaderBytes> bytes);
// kArgument: not our protocol. kUsage: another version of it.
Result<Header> decode_header(std::span<const std::uint8_t, kHeaderBytes> bytes);

// `body` is the body_bytes behind the header. kArgument when any field is out of its range.
Result<Hello> decode_hello(std::span<const std::uint8_t> body);
std::string decode_reject(std::span<const std::uint8_t> body);

}  // namespace verbatim::wire
