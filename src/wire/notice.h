// The messages on the side channel of an established connection, after the handshake's kReady:
//
//   kClose        graceful close
//   kFailed       this end has failed: its first error; or its application closed it with outstanding operations
//   kPing         keepalive; the answer is kPong
//   kStatusQuery  asks for the peer's view of the connection; the answer is kStatusReply
//   kLaneDown     this end uses a lane no more: its QPs there are in ERR. Those of the peer follow
//   kLaneFenced   this end has no work outstanding on the lane; with what has arrived there
//   kLaneOffer    of a sender: new QPs for a lane that is down at both ends
//   kLaneAnswer   of a receiver: its new QPs, which are connected to those of the offer
//   kAck          how many messages have come of those that must arrive: kClose, kFailed, and those about lanes
//   kResume       only as the first message of a new TCP connection: the side channel of a connection is made again
//
// A notice has the handshake's header and a small body. Nothing here takes memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>

#include "wire/authentication.h"
#include "wire/codec.h"
#include "wire/handshake.h"

namespace verbatim::wire {

constexpr std::size_t kMaxFailureText = 256;
constexpr std::size_t kMaxNoticeBody = sizeof(std::uint32_t) + kMaxFailureText;
constexpr std::size_t kMaxNoticeBytes = kHeaderBytes + kMaxNoticeBody;

// The body of kAck. It counts the messages that must arrive, over all TCP connections of a side channel.
struct Ack {
  std::uint64_t received = 0;  // by the sender of this
  std::uint64_t number = 0;    // of the next one from it on this TCP connection, counted from 0
};

// The body of kResume, which ends with a MAC of the session key.
struct Resume {
  ConnectionEnd end;         // of the receiver
  std::uint64_t number = 0;  // from 1, of all that the sender makes: one that was used is not taken again

  auto operator<=>(const Resume&) const = default;
};
static_assert(sizeof(Resume) == 40);  // no padding

// The first error of the other end.
struct FailureNotice {
  ErrorKind kind = ErrorKind::kNone;
  std::string_view text;  // points into the message; printable
};

// One end of a connection as it sees itself.
struct ConnectionStatus {
  enum Flag : std::uint16_t {
    kSendRefused = 0x1,  // sender: its application calls isend and finds no receive
    kCtsReady = 0x2,     // sender: there is a CTS entry for the next message
    kTested = 0x4,       // its application has recently tested a request that was not done
    kFailed = 0x8,
    kOptionalReceives = 0x10,  // receiver: it has posted receives with optional completion
  };
  std::uint32_t id = 0;  // of the query
  std::uint8_t sends = 0;
  std::uint8_t qp_state = 0;  // enum ibv_qp_state: of a QP in error, else of the first not in RTS
  std::uint16_t flags = 0;
  std::uint32_t members = 0;      // messages sent, or receives posted, so far; equal at both ends for the same message
  std::uint32_t outstanding = 0;  // work requests not completed, or receives that have not arrived
  std::uint32_t flushes = 0;      // outstanding
  std::uint32_t no_progress_ms = 0;  // since the last progress; 0 where it is not watched
  std::uint64_t bytes = 0;           // transferred so far
};
static_assert(sizeof(ConnectionStatus) == 32);

// More QPs than a lane can have that is to fail over.
constexpr std::size_t kMaxLaneQps = 56;

// The body of kLaneDown. A lane's QPs are made anew each time it comes back: `round` counts that, from 0.
struct LaneDown {
  std::uint32_t lane = 0;
  std::uint32_t round = 0;
};

// The body of kLaneFenced. A sender reports only the lane, the round, `members` and `all_drained`.
struct LaneReport {
  std::uint32_t lane = 0;
  std::uint32_t round = 0;
  std::uint32_t members = 0;       // receives posted so far; of a sender, members of messages begun so far
  std::uint32_t next_arrival = 0;  // the first member that has not arrived, `members` if all have
  std::uint32_t all_arrived = 0;   // 1: no immediate is missing on any lane, and `arrived` is empty
  std::uint32_t all_drained = 0;   // of a sender, 1: nothing is outstanding on any lane that has carried messages
  std::uint32_t qps = 0;           // elements of `arrived`
  // Immediates that have arrived on each QP of the lane, modulo 2^32, since it was made. Of a comm that posts whole
  // messages again: which members have arrived, bit i % 32 of element i / 32 for the one with ring index i. On the wire
  // only `qps` of them.
  std::uint32_t arrived[kMaxLaneQps] = {};
};
constexpr std::uint32_t kArrivedBits = 32;  // of an element
static_assert(kMaxLaneQps * kArrivedBits >= kMaxInFlight);

// The body of kLaneOffer and kLaneAnswer: the address of a lane at one end, in this round.
struct LaneAddress {
  std::uint32_t lane = 0;
  std::uint32_t round = 0;
  std::array<std::uint8_t, 16> gid = {};
  std::uint16_t lid = 0;
  std::uint16_t gid_index = 0;
  std::uint32_t qps = 0;
  std::uint32_t qp_numbers[kMaxLaneQps] = {};  // on the wire only `qps` of them
};

class Notice {
 public:
  std::span<const std::uint8_t> bytes() const { return std::span(bytes_).first(size_); }
  MessageType type() const { return type_; }

  static Notice without_body(MessageType type) { return Notice(type, 0); }
  // `kind` kNone: closed with outstanding operations. A text above kMaxFailureText is cut at the end of a statement or
  // of a word.
  static Notice failed(ErrorKind kind, std::string_view text);
  static Notice status_query(std::uint32_t id) { return with_body(MessageType::kStatusQuery, id); }
  static Notice status_reply(const ConnectionStatus& reply) { return with_body(MessageType::kStatusReply, reply); }
  static Notice ack(const Ack& ack) { return with_body(MessageType::kAck, ack); }
  // `session`: the key of the connection.
  static Notice resume(const Resume& resume, const Key& session);
  static Notice lane_down(const LaneDown& down) { return with_body(MessageType::kLaneDown, down); }
  static Notice lane_fenced(const LaneReport& report);
  // `type`: kLaneOffer or kLaneAnswer.
  static Notice lane_address(MessageType type, const LaneAddress& address);

 private:
  explicit Notice(MessageType type, std::size_t body_bytes);
  template <typename T>
  static Notice with_body(MessageType type, const T& body) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof body <= kMaxNoticeBody);
    Notice notice(type, sizeof body);
    std::memcpy(notice.bytes_.data() + kHeaderBytes, &body, sizeof body);
    return notice;
  }

  std::array<std::uint8_t, kMaxNoticeBytes> bytes_;
  std::size_t size_;
  MessageType type_;
};

// nullopt when a body is too short or has impossible fields. The text of a failure is made printable in place.
std::optional<FailureNotice> decode_failure(std::span<std::uint8_t> body);
std::optional<ConnectionStatus> decode_status_reply(std::span<const std::uint8_t> body);
std::optional<Resume> decode_resume(std::span<const std::uint8_t> body);
std::optional<LaneReport> decode_lane_fenced(std::span<const std::uint8_t> body);
std::optional<LaneAddress> decode_lane_address(std::span<const std::uint8_t> body);
// For a body of which every value is possible: an Ack, a LaneDown, or the number of a status query.
template <typename T>
std::optional<T> decode(std::span<const std::uint8_t> body) {
  Reader reader(body);
  const T decoded = reader.get<T>();
  return reader.complete() ? std::optional(decoded) : std::nullopt;
}

}  // namespace verbatim::wire
