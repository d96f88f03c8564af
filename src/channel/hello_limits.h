// How many TCP connections that have not shown the secret of a listen a process keeps, and how long.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/clock.h"

namespace verbatim {

// The dialling side sends its hello right after the TCP connect.
constexpr int kHelloTimeoutS = 3;
constexpr std::uint64_t kHelloTimeoutNs = kHelloTimeoutS * kNanosecondsPerSecond;
// Connections without a complete hello hold at most this many descriptors. For a further connection the oldest is
// closed, but not before it has had kMinPendingNs to send the rest of its hello.
constexpr std::size_t kMaxPending = 128;
constexpr std::uint64_t kMinPendingNs = 20 * kNanosecondsPerMillisecond;
// A hello that is sent later than this after the beginning of the TCP connect can be too late for the listener.
constexpr std::uint64_t kMaxHelloDelayNs = 10 * kNanosecondsPerMillisecond;

}  // namespace verbatim
