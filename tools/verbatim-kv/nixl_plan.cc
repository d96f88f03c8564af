#include "verbatim-kv/nixl_plan.h"

#include <cstdint>
#include <deque>
#include <utility>

#include "verbatim-kv/inject.h"
#include "verbatim-kv/report.h"
#include "workload/kv/validation.h"

namespace verbatim::kv {
namespace {

using ranks::Json;

// Takes blocks for one request after the other.
class BlockSequence {
 public:
  BlockSequence(BlockPool pool, std::size_t most_requests) : pool_(std::move(pool)), most_requests_(most_requests) {}

  std::vector<std::uint32_t> take(std::size_t count) {
    if (held_.size() == most_requests_) release_oldest();
    std::vector<std::uint32_t> blocks = pool_.take(count);
    while (blocks.empty()) {  // ends: the pool is large enough for each request alone
      release_oldest();
      blocks = pool_.take(count);
    }
    held_.push_back(blocks);
    return blocks;
  }

 private:
  void release_oldest() {
    pool_.give_back(held_.front());
    held_.pop_front();
  }

  BlockPool pool_;
  const std::size_t most_requests_;
  std::deque<std::vector<std::uint32_t>> held_;
};

// The block tables of one family on all ranks.
class Tables {
 public:
  Tables(const Options& options, const FamilyReport& family, std::size_t reserved) : family_(family) {
    const FamilyId id = family.geometry.family;
    for (std::uint32_t index = 0; index < static_cast<std::uint32_t>(options.prefills); ++index) {
      prefills_.emplace_back(prefill_pool(options, id, family.blocks[0], index),
                             options.concurrency * static_cast<std::size_t>(options.engines()));
    }
    for (std::uint32_t index = 0; index < static_cast<std::uint32_t>(options.decodes); ++index) {
      decodes_.emplace_back(decode_pool(options, id, family.blocks[1], reserved, index), options.concurrency);
    }
  }

  Json of(const Request& request, const Fault* fault) {
    const Geometry& geometry = family_.geometry;
    const std::size_t first = request.hit_blocks(geometry.block_tokens);
    const std::size_t count = request.blocks(geometry.block_tokens) - first;
    Json json{{"first", first},
              {"source", prefills_[request.prefill].take(count)},
              {"destinations", Json::array()},
              {"bad", Json::array()}};
    for (std::uint32_t part = 0; part < geometry.tp_ratio; ++part) {
      const std::vector<std::uint32_t> blocks = decodes_[request.engine * geometry.tp_ratio + part].take(count);
      json["destinations"].push_back(blocks);
      if (fault != nullptr) json["bad"].push_back(bad_list(fault->code, blocks));
    }
    return json;
  }

 private:
  // An invalid list as the prefill side reads it. Lists that differ from the family's in their blocks only, or name
  // another family, are indices into a list of descriptors that was prepared for the family; the others are addresses.
  Json bad_list(RejectionCode code, const std::vector<std::uint32_t>& blocks) const {
    const Family family{.geometry = family_.geometry,
                        .num_blocks = family_.blocks[1],
                        .block_len = family_.geometry.part_bytes(),
                        .bases = std::vector<std::uint64_t>(family_.geometry.layers)};
    BlockList list = make_list(family, blocks);
    const BlockList valid = list;
    corrupt_block(list, code, family.num_blocks);
    const bool is_indexed =
        list.piece_bytes == valid.piece_bytes && list.block_len == valid.block_len && list.bases == valid.bases;
    return {{"kind", rejection_name(code)},
            {"by", is_indexed ? "index" : "address"},
            {"family", static_cast<int>(list.family)},
            {"piece_bytes", list.piece_bytes},
            {"block_len", list.block_len},
            {"bases_added", list.bases},
            {"blocks", list.blocks}};
  }

  const FamilyReport& family_;
  std::vector<BlockSequence> prefills_;
  std::vector<BlockSequence> decodes_;
};

Json planned_family(const FamilyReport& family) {
  const Geometry& geometry = family.geometry;
  return {{"id", static_cast<int>(geometry.family)},
          {"name", geometry.name},
          {"layers", geometry.layers},
          {"entries", geometry.entries},
          {"tp_ratio", geometry.tp_ratio},
          {"divided", geometry.heads != 0},
          {"prefill_bytes", geometry.prefill_bytes},
          {"part_bytes", geometry.part_bytes()},
          {"prefill_blocks", family.blocks[0]},
          {"decode_blocks", family.blocks[1]}};
}

}  // namespace

Json nixl_plan(const Options& options, const std::vector<Request>& requests, const Layout& layout) {
  Json plan{{"ranks", options.prefills + options.decodes},
            {"prefills", options.prefills},
            {"decodes", options.decodes},
            {"concurrency", options.concurrency},
            {"warmup", options.warmup},
            {"check", options.check},
            {"request_timeout_ms", options.request_timeout_ms},
            {"allocations", allocations_name(options.allocations)},
            {"pages", memory::pages_name(options.pages)},
            {"families", Json::array()},
            {"requests", Json::array()}};
  std::vector<Tables> tables;
  std::vector<Faults> faults;
  for (std::size_t i = 0; i < layout.reports.size(); ++i) {
    plan["families"].push_back(planned_family(layout.reports[i]));
    tables.emplace_back(options, layout.reports[i], layout.reserved[i]);
    faults.emplace_back(options.faults, layout.reports[i].geometry.family);
  }
  for (const Request& request : requests) {
    Json json{
        {"id", request.id}, {"prefill", request.prefill}, {"engine", request.engine}, {"families", Json::array()}};
    for (std::size_t i = 0; i < tables.size(); ++i) {
      json["families"].push_back(tables[i].of(request, faults[i].find(FaultKind::kInvalidList, request.id, 0)));
    }
    plan["requests"].push_back(std::move(json));
  }
  return plan;
}

}  // namespace verbatim::kv
