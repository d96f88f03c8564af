// The stages that are tried in turn when the transfer of a request fails. Each stage has a deadline, so all of them
// together end in bounded time.
#pragma once

#include <cstdint>

namespace verbatim::kv {

enum class FallbackStage : std::uint8_t {
  kDirect,     // over the established connection
  kFresh,      // again, over a new connection
  kStaged,     // gathered, copied through TCP sockets, scattered
  kRecompute,  // not transferred: its blocks are listed for recomputation
};
constexpr int kFallbackStages = 4;

constexpr const char* stage_name(FallbackStage stage) {
  constexpr const char* kNames[kFallbackStages] = {"direct", "fresh connection", "staged copy", "recompute"};
  return kNames[static_cast<int>(stage)];
}

// The stage after `failed`. `connection` is false when no new connection could be made; kFresh is skipped then.
constexpr FallbackStage next_stage(FallbackStage failed, bool connection) {
  if (failed == FallbackStage::kDirect && connection) return FallbackStage::kFresh;
  if (failed == FallbackStage::kDirect || failed == FallbackStage::kFresh) return FallbackStage::kStaged;
  return FallbackStage::kRecompute;
}

}  // namespace verbatim::kv
