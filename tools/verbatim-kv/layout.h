// The number of blocks of each family on each rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "verbatim-kv/options.h"
#include "verbatim-kv/report.h"
#include "workload/kv/block_pool.h"
#include "workload/kv/requests.h"

namespace verbatim::kv {

struct Layout {
  std::vector<Family> families = {};       // of this rank, without addresses
  std::vector<std::size_t> reserved = {};  // by family: blocks for prefixes that the decode side already has
  std::vector<FamilyReport> reports = {};
  std::size_t longest_blocks = 0;  // blocks of the longest request
};

// Gives each family 1.5 times the blocks that the requests in flight need, or --blocks. Throws Failure when a request
// needs more blocks than there are.
Layout lay_out(const Options& options, const std::vector<Request>& requests, bool is_prefill);

// The pools from which the `index`-th prefill or decode rank takes the blocks of a family.
BlockPool prefill_pool(const Options& options, FamilyId family, std::size_t blocks, std::uint32_t index);
BlockPool decode_pool(const Options& options, FamilyId family, std::size_t blocks, std::size_t reserved,
                      std::uint32_t index);

}  // namespace verbatim::kv
