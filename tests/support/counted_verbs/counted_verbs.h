// What a verbs library between the plugin and softverbs has counted: the objects that are alive; and which of its calls
// fails. The library is given to the plugin as VERBATIM_VERBS_LIBRARY; a test finds the counters by the symbol
// kCountersSymbol.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>

#include "support/fail_nth.h"

namespace verbatim::test {

enum class VerbsObject : std::size_t { kContext, kPd, kMr, kCq, kQp, kChannel };
constexpr std::array<const char*, 6> kVerbsObjectNames = {"context", "pd", "mr", "cq", "qp", "channel"};

struct VerbsCounters {
  std::array<std::atomic<long>, kVerbsObjectNames.size()> alive{};
  std::array<std::atomic<long>, kVerbsObjectNames.size()> made{};
  // When it is a descriptor, each object that is destroyed is named there in a line of its own, and each QP that is
  // moved as "modify".
  std::atomic<int> report_fd{-1};
  // How many QPs were given a path to their peer with each traffic class.
  std::array<std::atomic<long>, 256> paths{};
  // Of every verb that the plugin uses, by its name.
  FailNth fail;
  // Called with the name of a verb before each, by the thread that calls the verb.
  std::atomic<void (*)(const char* verb)> before{nullptr};
};

constexpr const char* kCountersSymbol = "verbatim_verbs_counters";

}  // namespace verbatim::test
