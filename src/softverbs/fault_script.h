// The text in which faults are asked for: clauses between ';' or line ends, '#' up to the end of a line is comment.
//   drop-ack op=write_imm nth=2 times=3; loss rate=0.01; seed=7
// README describes every clause. Here text becomes FaultClauses; what they do is in faults.h.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace verbatim::softverbs {

enum class FaultKind : std::uint8_t {
  kSeed,
  kDropAck,      // the responder has executed, the requester hears nothing
  kDropRequest,  // the responder hears nothing
  kLoss,         // both, by chance
};

constexpr std::uint32_t kAnyDevice = ~0U;
constexpr std::uint64_t kWithoutEnd = ~std::uint64_t{0};

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
  std::uint32_t opcodes = ~0U;  // 1 << ibv_wr_opcode
  QpChoice qp_choice = QpChoice::kAny;
  std::uint32_t qp = 0;
  std::uint32_t device = kAnyDevice;
  bool only_last = false;   // with nothing posted behind it
  std::uint64_t nth = 1;    // the first of them,
  std::uint64_t count = 1;  // and how many from there

  // What happens to them.
  std::uint64_t times = 1;  // so often to each message
  double rate = 0;          // instead of `times`: at each attempt with this probability
  std::uint64_t seed = 0;
};

using FaultScript = std::vector<FaultClause>;

// The clauses, or one line that names the offending one and says what is expected.
std::variant<FaultScript, std::string> parse_faults(std::string_view text);

}  // namespace verbatim::softverbs
