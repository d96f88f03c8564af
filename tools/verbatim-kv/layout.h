// How many blocks of which family each rank of a run has.
#pragma once

#include <cstddef>
#include <vector>

#include "verbatim-kv/options.h"
#include "verbatim-kv/report.h"
#include "workload/kv/requests.h"

namespace verbatim::kv {

struct Layout {
  std::vector<Family> families = {};       // of this rank, without addresses yet
  std::vector<std::size_t> reserved = {};  // blocks of each for prefixes that the decode side has
  std::vector<FamilyReport> reports = {};
  std::size_t longest_blocks = 0;  // of a request
};

// Enough for the requests in flight, and half again, or what --blocks says. Throws Failure when one request would not
// find room.
Layout lay_out(const Options& options, const std::vector<Request>& requests, bool is_prefill);

}  // namespace verbatim::kv
