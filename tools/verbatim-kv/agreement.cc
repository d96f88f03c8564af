#include "verbatim-kv/agreement.h"

#include <string>

#include "ranks/agreement.h"

namespace verbatim::kv {
namespace {

std::string families_of(const Options& options) {
  std::string names;
  for (const Geometry& geometry : options.geometries) names += (names.empty() ? "" : " ") + geometry.name;
  return names;
}

std::string faults_of(const Options& options) {
  std::string all;
  for (const Fault& fault : options.faults) {
    for (const std::uint64_t number : {static_cast<std::uint64_t>(fault.kind), static_cast<std::uint64_t>(fault.code),
                                       std::uint64_t{fault.in_flight}, static_cast<std::uint64_t>(fault.family),
                                       std::uint64_t{fault.request.value_or(0)}, std::uint64_t{fault.times}}) {
      all += std::to_string(number) + " ";
    }
  }
  return all;
}

std::string list(const std::vector<Request>& requests) {
  std::string all;
  for (const Request& request : requests) {
    if (!all.empty()) all += ',';
    all += std::to_string(request.tokens) + " tokens";
    if (request.hit > 0) all += " with " + std::to_string(request.hit) + " hit";
  }
  return all;
}

}  // namespace

void agree(ranks::CoordinatorConnection& coordinator, const Options& options, const std::vector<Request>& requests) {
  ranks::agree(
      coordinator, options.job.rank,
      {{"mode (--mode)", mode_name(options.mode)},
       {"memory (--memory)", memory::kind_name(options.memory)},
       {"pages (--pages)", memory::pages_name(options.pages)},
       {"prefill ranks (--prefill)", std::to_string(options.prefills)},
       {"decode ranks (--decode)", std::to_string(options.decodes)},
       {"TP ratio (--tp-ratio)", std::to_string(options.tp_ratio)},
       {"families (--preset, --lf, --lf-first)", families_of(options)},
       {"requests in flight (--concurrency)", std::to_string(options.concurrency)},
       {"blocks (--blocks)", std::to_string(options.blocks)},
       {"check (--no-check)", options.check ? "full" : "off"},
       {"warm-up (--warmup)", std::to_string(options.warmup)},
       {"idle family (--idle)", options.idle ? std::to_string(static_cast<unsigned>(*options.idle)) : "none"},
       {"injected faults (--inject)", faults_of(options)},
       {"number of requests (--requests, --request-file)", std::to_string(requests.size())},
       {"requests (--tokens, --sigma, --max-tokens, --hit, --seed, --request-file)", list(requests), "request"}});
}

}  // namespace verbatim::kv
