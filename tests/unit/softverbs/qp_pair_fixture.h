// Fixture for tests with faults. A process reads SOFTVERBS_FAULTS when it opens its first device, so each case runs in
// a child process.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "support/verbs_fixture.h"

namespace verbatim::test {

// Runs `body` in a child with SOFTVERBS_FAULTS=faults; its failures are failures of this test. Returns its stderr.
std::string with_faults(const std::string& faults, const std::function<void()>& body);

// Time since construction. Tests use only lower bounds, which hold on a busy machine too.
class Stopwatch {
 public:
  std::chrono::nanoseconds elapsed() const { return std::chrono::steady_clock::now() - start_; }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// The duration of `attempts` attempts without a response.
constexpr std::chrono::nanoseconds time_of_attempts(const Timers& timers, unsigned attempts) {
  return std::chrono::nanoseconds(4096) * (1U << timers.timeout) * attempts;
}

// Two connected QPs of this process, each with a memory region.
struct Pair {
  explicit Pair(const Timers& timers = {}, std::size_t bytes = 4096)
      : source(device.pd.get(), bytes, 0, kAllAccess | IBV_ACCESS_REMOTE_ATOMIC),
        target(device.pd.get(), bytes, 0, kAllAccess | IBV_ACCESS_REMOTE_ATOMIC),
        a(device, {.timers = timers}),
        b(device, {.access = kAllAccess | IBV_ACCESS_REMOTE_ATOMIC, .timers = timers}) {
    connect(a, b);
  }
  SendOptions to_target(std::uint64_t wr_id = 0, std::size_t offset = 0) const {
    return {.wr_id = wr_id, .remote_addr = target.address(offset), .rkey = target.mr->rkey};
  }

  Device device = open_device();
  Region source;
  Region target;
  Endpoint a;
  Endpoint b;
};

}  // namespace verbatim::test
