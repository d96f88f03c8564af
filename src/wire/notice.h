// What the two ends of a standing connection tell each other over the side channel, after the handshake's kReady:
//
//   kBye     closed in peace
//   kFailed  this end has failed, and its first error; or its owner has given it up with work outstanding
//   kPing    are you there?             kPong  yes
//   kAsk     how does it look to you?   kView  like this
//
// A notice has the handshake's header and a small body. Nothing here allocates: the control thread speaks it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "wire/handshake.h"

namespace verbatim::wire {

constexpr std::size_t kMaxFailureText = 256;
constexpr std::size_t kMaxNoticeBody = sizeof(std::uint32_t) + kMaxFailureText;
constexpr std::size_t kMaxNoticeBytes = kHeaderBytes + kMaxNoticeBody;

class Notice {
 public:
  std::span<const std::uint8_t> bytes() const { return std::span(bytes_).first(size_); }

  static Notice without_body(MessageType type);
  // `kind` as ErrorKind has it; kNone: given up. A longer text is cut.
  static Notice failed(ErrorKind kind, std::string_view text);
  static Notice status_query(std::uint32_t id);
  static Notice status_reply(const struct ConnectionStatus& status_reply);

 private:
  explicit Notice(MessageType type, std::size_t body_bytes);
  template <typename T>
  static Notice with_body(MessageType type, const T& body);

  std::array<std::uint8_t, kMaxNoticeBytes> bytes_;
  std::size_t size_;
};

// The first error of the other end.
struct FailureNotice {
  ErrorKind kind = ErrorKind::kNone;
  std::string_view text;  // in the message; printable
};

// One end of a connection as it sees itself.
struct ConnectionStatus {
  enum Flag : std::uint16_t {
    kSendRefused = 0x1,  // sender: its application calls isend and is refused
    kCtsReady = 0x2,     // sender: there is a CTS for the next message
    kTested = 0x4,       // its application has asked lately whether something is done
    kFailed = 0x8,
    kOptionalReceives = 0x10,  // receiver: some receives end without a word of the sender
  };
  std::uint32_t id = 0;  // of the question
  std::uint8_t sends = 0;
  std::uint8_t qp_state = 0;  // enum ibv_qp_state: of the QP that is worst off
  std::uint16_t flags = 0;
  std::uint32_t members = 0;         // messages sent, or receives posted, so far: of equal numbers the same are meant
  std::uint32_t outstanding = 0;     // work requests not completed, or receives that have not arrived
  std::uint32_t flushes = 0;         // outstanding
  std::uint32_t no_progress_ms = 0;  // since something moved; 0 where nobody looks
  std::uint64_t bytes = 0;           // moved so far
};
static_assert(sizeof(ConnectionStatus) == 32);

// Where a body is too short or has impossible fields: nullopt. A failure's text is made printable in place.
std::optional<FailureNotice> decode_failure(std::span<std::uint8_t> body);
std::optional<std::uint32_t> decode_status_query(std::span<const std::uint8_t> body);
std::optional<ConnectionStatus> decode_status_reply(std::span<const std::uint8_t> body);

}  // namespace verbatim::wire
