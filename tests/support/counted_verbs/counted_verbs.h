// Counters of the verbs library that is placed between the plugin and softverbs: it counts the verbs objects that are
// alive and makes chosen calls fail. The plugin opens the library by VERBATIM_VERBS_LIBRARY. A test finds the counters
// by the symbol kCountersSymbol.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>

#include "support/fail_nth.h"

struct ibv_qp_attr;

namespace verbatim::test {

enum class VerbsObject : std::size_t { kContext, kPd, kMr, kCq, kQp, kChannel };
constexpr std::array<const char*, 6> kVerbsObjectNames = {"context", "pd", "mr", "cq", "qp", "channel"};

struct VerbsCounters {
  std::array<std::atomic<long>, kVerbsObjectNames.size()> alive{};
  std::array<std::atomic<long>, kVerbsObjectNames.size()> made{};
  // What has been registered, and the entries of the queues that were created: NICs keep both in pinned memory.
  std::atomic<long> registered_bytes{0};
  std::atomic<long> queue_entries{0};
  // When not -1: the library writes a line to this descriptor for each destroyed object (the name of its kind) and for
  // each ibv_modify_qp ("modify").
  std::atomic<int> report_fd{-1};
  // Called at the start of each ibv_modify_qp, on the thread that calls it.
  std::atomic<void (*)(const ibv_qp_attr& attributes, int mask)> modify{nullptr};
  // Makes calls fail, for every verb that the plugin uses; selected by the name of the verb.
  FailNth fail;
  // Called with the verb's name before each verb, on the thread that calls the verb.
  std::atomic<void (*)(const char* verb)> before{nullptr};
};

constexpr const char* kCountersSymbol = "verbatim_verbs_counters";

}  // namespace verbatim::test
