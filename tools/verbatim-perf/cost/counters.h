// What softverbs has counted for this process.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "softverbs/host/stats.h"

namespace verbatim::perf::cost {

// Trivially copyable, because it is sent through a pipe.
struct Reading {
  softverbs::WorkStats work;
  std::uint64_t doorbells = 0;
  std::uint64_t polls = 0;
  std::uint64_t empty_polls = 0;
  std::array<softverbs::ObjectStats, softverbs::kObjectNames.size()> objects;
};
static_assert(std::is_trivially_copyable_v<Reading>);

// Throws Failure.
Reading read_counters();

// The verbs calls, work requests and completions between two readings.
nlohmann::ordered_json difference(const Reading& before, const Reading& after);

}  // namespace verbatim::perf::cost
