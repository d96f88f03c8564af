// What is tried for a request, one after the other, when its transfer fails. Each rung has a deadline, so the whole
// ladder ends in bounded time.
#pragma once

#include <cstdint>

namespace verbatim::kv {

enum class Rung : std::uint8_t {
  kDirect,     // over the connection that stands
  kFresh,      // again, over a fresh one
  kStaged,     // gathered, copied through the host's sockets, scattered
  kRecompute,  // given up: its blocks are listed for recomputation
};
constexpr int kRungs = 4;

constexpr const char* rung_name(Rung rung) {
  constexpr const char* kNames[kRungs] = {"direct", "fresh connection", "staged copy", "recompute"};
  return kNames[static_cast<int>(rung)];
}

// The rung after `failed`. Without a connection (a fresh one could not be made) nothing that needs one is tried.
constexpr Rung next_rung(Rung failed, bool connection) {
  if (failed == Rung::kDirect && connection) return Rung::kFresh;
  if (failed == Rung::kDirect || failed == Rung::kFresh) return Rung::kStaged;
  return Rung::kRecompute;
}

}  // namespace verbatim::kv
