// The begin of every verb: counts the call and applies the faults of calls.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

#include "softverbs/faults/faults.h"

namespace verbatim::softverbs {

// Every verb calls it first: counts the call and applies pending fault commands. Returns the errno with which the call
// must fail, and sets errno to it; 0: the call proceeds.
int begin_call(Verb verb, ibv_context* context);

// The same for verbs of the data path, which are counted elsewhere.
inline int begin_data_call(std::uint64_t call, std::uint32_t device) {
  Faults* const all = faults();
  return all == nullptr ? 0 : all->refused_call(call, device);
}

}  // namespace verbatim::softverbs
