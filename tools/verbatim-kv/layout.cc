#include "verbatim-kv/layout.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace verbatim::kv {
namespace {

// The number of blocks over what the requests in flight need on average.
constexpr double kSpareBlocks = 1.5;

}  // namespace

Layout lay_out(const Options& options, const std::vector<Request>& requests, bool is_prefill) {
  Layout layout;
  for (const Geometry& geometry : options.geometries) {
    std::size_t longest = 0;
    std::size_t longest_hit = 0;
    double mean = 0;
    for (const Request& request : requests) {
      const std::size_t hits = request.hit_blocks(geometry.block_tokens);
      const std::size_t sent = request.blocks(geometry.block_tokens) - hits;
      longest = std::max(longest, sent);
      longest_hit = std::max(longest_hit, hits);
      mean += static_cast<double>(sent) / static_cast<double>(requests.size());
    }
    if (options.blocks > 0 && options.blocks < longest + longest_hit) {
      throw Failure("--blocks " + std::to_string(options.blocks) + ": a request of family " + geometry.name +
                        " needs " + std::to_string(longest + longest_hit),
                    ExitStatus::kUsage);
    }
    const auto in_flight =
        static_cast<std::size_t>(std::ceil(kSpareBlocks * mean * static_cast<double>(options.concurrency)));
    std::size_t prefill_blocks = std::max(longest, in_flight * static_cast<std::size_t>(options.engines()));
    std::size_t decode_blocks = longest_hit + std::max(longest, in_flight);
    if (options.blocks > 0) prefill_blocks = decode_blocks = options.blocks;
    layout.families.push_back({.geometry = geometry,
                               .num_blocks = is_prefill ? prefill_blocks : decode_blocks,
                               .block_len = is_prefill ? geometry.prefill_bytes : geometry.part_bytes()});
    layout.reserved.push_back(longest_hit);
    layout.longest_blocks = std::max(layout.longest_blocks, longest);
    layout.reports.push_back({.geometry = geometry,
                              .blocks = {prefill_blocks, decode_blocks},
                              .plan = options.idle == geometry.family ? Plan{} : plan_of(geometry, requests),
                              .stats = {}});
  }
  return layout;
}

BlockPool prefill_pool(const Options& options, FamilyId family, std::size_t blocks, std::uint32_t index) {
  return {blocks, 0, options.fragmentation,
          options.requests.seed * 7919 + std::uint64_t{index} * 2 + static_cast<std::uint64_t>(family)};
}

BlockPool decode_pool(const Options& options, FamilyId family, std::size_t blocks, std::size_t reserved,
                      std::uint32_t index) {
  return {blocks, reserved, options.fragmentation,
          options.requests.seed * 104'729 + std::uint64_t{index} * 2 + static_cast<std::uint64_t>(family)};
}

}  // namespace verbatim::kv
