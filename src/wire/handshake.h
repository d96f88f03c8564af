// The handshake over the side channel that establishes a connection:
//
//   connecting side                      accepting side
//        | ---- kConnect: Hello ------------> |    finds the listen comm by its name, creates its QPs in state RTS
//        | <--- kAccept: Hello -------------- |
//    RTS | ---- kReady ---------------------> |    may write its first CTS entry
//
// When the side channel of an established connection has ended with an error, or is of no use any more, either side
// makes it again, over any address of the other one:
//
//   this side                            other side
//        | ---- kResume: Resume ------------> |    finds its end, uses this side channel from now on
//        | <--- kAck ------------------------ |
//
// All messages have the same header, and all but kReject end with a MAC (wire/authentication.h), which the length in
// the header counts. kConnect, kAccept and kResume have the ConnectionId first. The ranks of an RMA communicator
// exchange kConnect and kAccept, too, with another body behind it: wire/rma.h. kReject ends the handshake and has the
// reason as text. wire/notice.h has the messages of an established connection.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "wire/address.h"
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
  kResume = 11,
  kLaneDown = 12,
  kLaneFenced = 13,
  kLaneOffer = 14,
  kLaneAnswer = 15,
  kAck = 16,
  kExchange = 17,  // this and the next: between the ranks of an RMA communicator
  kRmaLane = 18,
};

struct Header {
  std::uint32_t magic;
  std::uint16_t version;
  MessageType type;
  std::uint32_t body_bytes;
};
constexpr std::size_t kHeaderBytes = 12;
static_assert(sizeof(Header) == kHeaderBytes);
constexpr std::size_t kMaxBodyBytes = 8192;  // no Hello is longer, so a longer message is of another protocol

// Optional features. The connecting side sends those that it wants and supports; the accepting side replies with those
// of them that the connection uses. kRoceV1 and kRoceV2 are facts about the sender: the type of the GIDs of all its
// devices, neither bit if it is not known or not the same.
enum Capability : std::uint32_t {
  kAtomicCompletion = 0x1,
  kFailover = 0x2,
  kRoceV1 = 0x4,
  kRoceV2 = 0x8,
  kReconnect = 0x10,
};

// One device of one end.
struct HelloDevice {
  std::array<std::uint8_t, 16> gid{};
  std::uint32_t control_rkey = 0;  // of this end's control memory on this device; 0 of RMA, which has none
  std::uint32_t max_message_bytes = 0;
  std::uint32_t speed_mbps = 0;  // declared by the port, not 0
  std::uint16_t lid = 0;
  std::uint8_t link_layer = 0;  // IBV_LINK_LAYER_*
  bool grh_required = false;    // packets to this device's port must have a GRH
  std::uint8_t mtu = 0;         // enum ibv_mtu: of the port
  std::uint8_t port = 0;
  std::uint8_t gid_index = 0;
  std::uint8_t responder_reads = 0;  // READs and atomics that a QP can have outstanding as responder
  std::string name;                  // of the verbs device, for log lines

  bool is_valid() const {
    constexpr std::uint8_t kMaxMtu = 5;  // IBV_MTU_4096
    return max_message_bytes != 0 && speed_mbps != 0 && mtu != 0 && mtu <= kMaxMtu;
  }
};

struct HelloQp {
  std::uint32_t number = 0;
  std::uint8_t device = 0;  // index into Hello::devices; 0 of RMA
  bool has_ece = false;
  std::array<std::uint32_t, 3> ece{};  // vendor_id, options, comp_mask
};

// The body of kConnect and kAccept.
struct Hello {
  ListenId listen;
  // Random, one for each connect; a hello that repeats it is a replay. The accepting side replies with the same number.
  std::uint64_t attempt = 0;
  PublicKey key{};  // of the sender's process
  PeerIdentity identity;
  std::uint64_t control_address = 0;  // connecting side: its CTS ring; accepting side: its CompletionRecord
  std::uint32_t capabilities = 0;     // Capability bits
  std::int16_t traffic_class = -1;    // connecting side: the communicator's, -1 when it has none
  std::string host;                   // host name, for log lines
  std::uint32_t pid = 0;              // for log lines
  std::vector<Address> addresses;     // 0 to kMaxAddresses: of this process, for the connection's next side channel
  std::vector<HelloDevice> devices;   // 1 to kMaxDevices
  std::vector<HelloQp> qps;           // 1 to kMaxQps; QP i of one end is connected to QP i of the other
};

// Names a connection at both ends: the listen and the attempt number of its hellos.
struct ConnectionId {
  ListenId listen;
  std::uint64_t attempt = 0;

  auto operator<=>(const ConnectionId&) const = default;
};
static_assert(sizeof(ConnectionId) == 24);  // no padding, as below

// One end of a connection.
struct ConnectionEnd {
  ConnectionId connection;
  std::uint64_t connecting = 0;  // 1: the end that has connected, 0: the one that has accepted

  ConnectionEnd other() const { return {connection, 1 - connecting}; }
  auto operator<=>(const ConnectionEnd&) const = default;
};
static_assert(sizeof(ConnectionEnd) == 32);  // no padding: messages have the whole structure

std::vector<std::uint8_t> encode_hello(MessageType type, const Hello& hello);
std::vector<std::uint8_t> encode_ready();
std::vector<std::uint8_t> encode_reject(const std::string& reason, std::uint16_t version = kProtocolVersion);

void put_header(std::span<std::uint8_t, kHeaderBytes> bytes, MessageType type, std::size_t body_bytes,
                std::uint16_t version = kProtocolVersion);
// Changes the length.
void put_body_bytes(std::span<std::uint8_t, kHeaderBytes> header, std::size_t body_bytes);
// Of a message that begins with Header{}.
std::vector<std::uint8_t> with_header(MessageType type, std::vector<std::uint8_t> message,
                                      std::uint16_t version = kProtocolVersion);

// The sender's protocol version, also if it is not kProtocolVersion.
std::uint16_t protocol_version(std::span<const std::uint8_t, kHeaderBytes> bytes);
// kArgument: a message of another protocol, or with a longer body. kUsage: another version of this protocol.
Result<Header> decode_header(std::span<const std::uint8_t, kHeaderBytes> bytes, std::size_t max_body = kMaxBodyBytes);

// `body` is the part after the header, or its beginning.
ConnectionId decode_connection_id(std::span<const std::uint8_t> body);
// `body` is the part after the header. kArgument when a field is out of range.
Result<Hello> decode_hello(std::span<const std::uint8_t> body);
std::string decode_reject(std::span<const std::uint8_t> body);

}  // namespace verbatim::wire
