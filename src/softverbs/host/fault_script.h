// Parses fault scripts: clauses separated by ';' or line ends. '#' begins a comment that ends with the line. Example:
//   drop-ack op=write_imm nth=2 times=3; link-down device=0 at=2s for=500ms; seed=7
// README.md describes every clause. This file turns text into FaultClauses; faults/ applies them.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "softverbs/host/counters.h"

namespace verbatim::softverbs {

enum class FaultKind : std::uint8_t {
  kSeed,
  kClear,  // removes and undoes all earlier clauses
  // Faults of messages
  kDropAck,      // the responder executes the request, the requester receives no acknowledgement
  kDropRequest,  // the responder does not receive the request
  kLoss,         // both of these, with a probability
  kDelay,
  kRnr,             // the responder answers with an RNR NAK
  kComplete,        // the request is not sent and completes with an error
  kDropCompletion,  // the request is executed and never completes
  // Faults of ports, of devices and of this process: they begin at some time and may end
  // To ports, devices and this process: they begin and may end
  kLinkDown,
  kLinkUp,
  kUnreachable,
  kReachable,
  kDeviceFatal,
  kFreeze,
  kThaw,
  kGid,
  kGidsReturn,  // of a port whose link is up again; no clause of a script
  // Faults of calls
  kFail,
  kSlow,  // calls take longer
  kRegistration,
};

constexpr std::uint32_t kAnyDevice = ~0U;
constexpr std::uint64_t kWithoutEnd = ~std::uint64_t{0};
constexpr std::uint32_t kReceiveBit = 1U << 31;  // bit of FaultClause::opcodes for posted receives

constexpr std::uint64_t call_bit(Verb verb) {
  return std::uint64_t{1} << static_cast<unsigned>(verb);
}
constexpr std::uint64_t kPostSendCall = std::uint64_t{1} << 63;  // or ibv_wr_complete
constexpr std::uint64_t kPostRecvCall = std::uint64_t{1} << 62;
constexpr std::uint64_t kPostSrqRecvCall = std::uint64_t{1} << 61;
constexpr std::uint64_t kPollCqCall = std::uint64_t{1} << 60;  // or ibv_start_poll
static_assert(kVerbNames.size() <= 60);
constexpr std::uint64_t kControlCalls = kPollCqCall - 1;  // all others

// The QPs whose messages are counted together for `nth`.
enum class QpChoice : std::uint8_t {
  kAny,      // all QPs of the process
  kEach,     // each QP separately
  kOrdinal,  // the QP that the process created as number `qp`, from 1
  kNumber,   // the QP with this QP number
};

struct FaultClause {
  FaultKind kind{};

  // The messages that the clause matches.
  std::uint32_t opcodes = ~kReceiveBit;  // bits 1 << ibv_wr_opcode
  QpChoice qp_choice = QpChoice::kAny;
  std::uint32_t qp = 0;
  bool only_last = false;   // only a message behind which nothing is posted
  std::uint64_t nth = 1;    // the first affected message among those that match
  std::uint64_t count = 1;  // number of affected messages

  // The effect on each affected message.
  std::uint64_t times = 1;  // number of attempts that the fault affects
  double rate = 0;          // instead of `times`: probability at each attempt
  std::uint64_t delay_ns = 0;
  std::uint64_t jitter_ns = 0;  // random extra delay, below this value
  ibv_wc_status status = IBV_WC_SUCCESS;
  std::uint32_t vendor_error = 0;

  // The start of a lasting fault: after this number of matching messages, or at a time.
  std::uint64_t after = 0;
  std::uint64_t at_ns = 0;             // relative to the moment when the process applies the clause
  std::uint64_t for_ns = kWithoutEnd;  // duration
  std::uint32_t device = kAnyDevice;   // for faults of messages: the device of the matching messages
  std::uint32_t peer_device = kAnyDevice;
  std::array<std::uint32_t, 2> pids{};  // 0: any process
  std::uint32_t gid_index = 0;
  bool gid_valid = false;
  ibv_gid gid{};
  std::uint32_t gid_type = IBV_GID_TYPE_ROCE_V2;

  // The refused or slow calls.
  std::uint64_t calls = 0;  // call_bit() of each verb
  int error = 0;            // errno
  std::uint64_t max_bytes = kWithoutEnd;
  std::uint64_t max_regions = kWithoutEnd;
  std::uint64_t max_locked = kWithoutEnd;

  std::uint64_t seed = 0;
};

using FaultScript = std::vector<FaultClause>;

// Returns the clauses, or one line that names the first malformed clause and the expected form.
std::variant<FaultScript, std::string> parse_faults(std::string_view text);

}  // namespace verbatim::softverbs
