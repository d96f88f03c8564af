// What is tried for a request, one after the other, when its transfer fails. Each rung has a deadline, so the whole
// ladder ends in bounded time.
#pragma once

#include <cstdint>

namespace verbatim::kv {

enum class FallbackStage : std::uint8_t {
  kDirect,     // over the connection that stands
  kFresh,      // again, over a fresh one
  kStaged,     // gathered, copied through the host's sockets, scattered
  kRecompute,  // given up: its blocks are listed for recomputation
};
constexpr int kFallbackStages = 4;

constexpr const char* stage_name(FallbackStage stage) {
  constexpr const char* kNames[kFallbackStages] = {"direct", "fresh connection", "staged copy", "recompute"};
  return kNames[static_cast<int>(stage)];
}

// The rung after `failed`. Without a connection (a fresh one could not be made) nothing that needs one is tried.
constexpr FallbackStage next_stage(FallbackStage failed, bool connection) {
  if (failed == FallbackStage::kDirect && connection) return FallbackStage::kFresh;
  if (failed == FallbackStage::kDirect || failed == FallbackStage::kFresh) return FallbackStage::kStaged;
  return FallbackStage::kRecompute;
}

}  // namespace verbatim::kv
