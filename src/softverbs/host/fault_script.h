// The text in which faults are asked for: clauses between ';' or line ends, '#' up to the end of a line is comment.
//   drop-ack op=write_imm nth=2 times=3; link-down device=0 at=2s for=500ms; seed=7
// README describes every clause. Here text becomes FaultClauses; what they do is in faults.h.
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
  kClear,  // everything before is undone
  // To messages
  kDropAck,      // the responder has executed, the requester hears nothing
  kDropRequest,  // the responder hears nothing
  kLoss,         // both, by chance
  kDelay,
  kRnr,             // the responder says that it has no receive
  kComplete,        // not sent: completed with an error
  kDropCompletion,  // done, and never completed
  // To ports, devices and this process: they begin and may end
  kLinkDown,
  kLinkUp,
  kUnreachable,
  kReachable,
  kDeviceFatal,
  kFreeze,
  kThaw,
  kGid,
  // To calls
  kFail,
  kRegistration,
};

constexpr std::uint32_t kAnyDevice = ~0U;
constexpr std::uint64_t kWithoutEnd = ~std::uint64_t{0};
constexpr std::uint32_t kReceiveBit = 1U << 31;  // of FaultClause::opcodes: posted receives

constexpr std::uint64_t call_bit(Verb verb) {
  return std::uint64_t{1} << static_cast<unsigned>(verb);
}
constexpr std::uint64_t kPostSendCall = std::uint64_t{1} << 63;  // or ibv_wr_complete
constexpr std::uint64_t kPostRecvCall = std::uint64_t{1} << 62;
constexpr std::uint64_t kPostSrqRecvCall = std::uint64_t{1} << 61;
constexpr std::uint64_t kPollCqCall = std::uint64_t{1} << 60;  // or ibv_start_poll
static_assert(kVerbNames.size() <= 60);

// Whose messages count together for `nth`.
enum class QpChoice : std::uint8_t {
  kAny,      // all of the process
  kEach,     // every QP for itself
  kOrdinal,  // the QP that the process created as its `qp`-th
  kNumber,   // the QP of that number
};

struct FaultClause {
  FaultKind kind{};
  std::string text;  // as it was written

  // Which messages.
  std::uint32_t opcodes = ~kReceiveBit;  // 1 << ibv_wr_opcode
  QpChoice qp_choice = QpChoice::kAny;
  std::uint32_t qp = 0;
  bool only_last = false;   // with nothing posted behind it
  std::uint64_t nth = 1;    // the first of them,
  std::uint64_t count = 1;  // and how many from there

  // What happens to them.
  std::uint64_t times = 1;  // so often to each message
  double rate = 0;          // instead of `times`: at each attempt with this probability
  std::uint64_t delay_ns = 0;
  std::uint64_t jitter_ns = 0;  // up to so much more, by chance
  ibv_wc_status status = IBV_WC_SUCCESS;
  std::uint32_t vendor_error = 0;

  // When a state begins: after so many of the messages above, or else at a time.
  std::uint64_t after = 0;
  std::uint64_t at_ns = 0;             // from when the clause is taken
  std::uint64_t for_ns = kWithoutEnd;  // how long it lasts
  std::uint32_t device = kAnyDevice;   // also of the messages
  std::uint32_t peer_device = kAnyDevice;
  std::array<std::uint32_t, 2> pids{};  // 0: of any processes
  std::uint32_t gid_index = 0;
  bool gid_valid = false;
  ibv_gid gid{};
  std::uint32_t gid_type = IBV_GID_TYPE_ROCE_V2;

  // What is refused.
  std::uint64_t calls = 0;  // call_bit()s
  int error = 0;            // errno
  std::uint64_t max_bytes = kWithoutEnd;
  std::uint64_t max_regions = kWithoutEnd;
  std::uint64_t max_locked = kWithoutEnd;

  std::uint64_t seed = 0;
};

using FaultScript = std::vector<FaultClause>;

// The clauses, or one line that names the offending one and says what is expected.
std::variant<FaultScript, std::string> parse_faults(std::string_view text);

}  // namespace verbatim::softverbs
