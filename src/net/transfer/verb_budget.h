// How many verbs one call of connect or accept may make. NCCL's service thread makes these calls for all connections of
// a rank, so that no call may take long: what does not fit is done in later calls.
#pragma once

#include <cstddef>
#include <limits>

namespace verbatim {

// Below 10 ms on a device whose firmware needs 0.4 ms for each verb.
constexpr std::size_t kVerbsPerCall = 16;

// Counts the verbs that enter the kernel. Created by the call, used by its thread.
class VerbBudget {
 public:
  VerbBudget() = default;
  static VerbBudget unlimited() { return VerbBudget(std::numeric_limits<std::size_t>::max()); }

  // To be called before so many verbs, at most kVerbsPerCall. False: not in this call.
  bool take(std::size_t verbs) {
    if (left_ < verbs) return false;
    left_ -= verbs;
    return true;
  }

  // After a verb that may have blocked for a second: no further verb in this call.
  void exhaust() { left_ = 0; }
  bool exhausted() const { return left_ == 0; }

 private:
  explicit VerbBudget(std::size_t verbs) : left_(verbs) {}

  std::size_t left_ = kVerbsPerCall;
};

}  // namespace verbatim
