// The handshake over the side channel that establishes a connection:
//
//   connecting side                      accepting side
//        | ---- kConnect: Hello ------------> |    finds the listen comm by the secret, creates its QPs in state RTS
//        | <--- kAccept: Hello -------------- |
//    RTS | ---- kReady ---------------------> |    may write its first CTS entry
//
// All messages have the same header. kReject ends the handshake and has the reason as text. wire/notice.h has the
// messages of an established connection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "wire/hello.h"
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
constexpr std::size_t kMaxBodyBytes = 8192;  // no Hello is longer, so a longer message is of another protocol

std::vector<std::uint8_t> encode_hello(MessageType type, const Hello& hello);
std::vector<std::uint8_t> encode_ready();
std::vector<std::uint8_t> encode_reject(const std::string& reason, std::uint16_t version = kProtocolVersion);

void put_header(std::span<std::uint8_t, kHeaderBytes> bytes, MessageType type, std::uint32_t body_bytes);

// The sender's protocol version, also if it is not kProtocolVersion.
std::uint16_t protocol_version(std::span<const std::uint8_t, kHeaderBytes> bytes);
// kArgument: a message of another protocol. kUsage: another version of this protocol.
Result<Header> decode_header(std::span<const std::uint8_t, kHeaderBytes> bytes);

// `body` is the part after the header. kArgument when a field is out of range.
Result<Hello> decode_hello(std::span<const std::uint8_t> body);
std::string decode_reject(std::span<const std::uint8_t> body);

}  // namespace verbatim::wire
