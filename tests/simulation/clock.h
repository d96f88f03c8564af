// How times of libc and virtual time belong together.
#pragma once

#include <ctime>

#include "simulation/scheduler.h"

namespace simulation {

// What the clocks show when a run begins. CLOCK_REALTIME: 1 January 2030. The others: a host that has run for an hour.
constexpr Time kBeginOfRealTime = 1'893'456'000 * kSecond;
constexpr Time kBeginOfOthers = 3600 * kSecond;

constexpr Time begin_of(clockid_t clock) {
  return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI ? kBeginOfRealTime
                                                                                         : kBeginOfOthers;
}

constexpr Time duration_of(const timespec& value) {
  return value.tv_sec < 0 ? 0 : static_cast<Time>(value.tv_sec) * kSecond + static_cast<Time>(value.tv_nsec);
}

// The virtual time at which `clock` shows `value`.
constexpr Time time_of(clockid_t clock, const timespec& value) {
  const Time shown = duration_of(value);
  return shown <= begin_of(clock) ? 0 : shown - begin_of(clock);
}

constexpr timespec to_timespec(Time duration) {
  return {static_cast<time_t>(duration / kSecond), static_cast<long>(duration % kSecond)};
}

// `timeout_ms` as poll takes it.
inline Time deadline_in_ms(int timeout_ms) {
  return timeout_ms < 0 ? kNever : now() + static_cast<Time>(timeout_ms) * kMillisecond;
}

}  // namespace simulation
