// What all families of one rank use: the run's settings and the plugin. All of it is read only or safe to use from
// several threads. State that changes belongs to one family.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "memory/memory.h"
#include "ranks/loaded_plugin.h"
#include "verbatim-kv/options.h"
#include "verbatim-kv/registrations.h"
#include "workload/kv/intervals.h"
#include "workload/kv/requests.h"

namespace verbatim::kv {

struct RankContext {
  const Options& options;
  ranks::LoadedPlugin& plugin;
  Registrations& registrations;
  memory::Memory& storage;    // contains the blocks
  const IntervalSet& memory;  // the registered parts of it
  const std::vector<Request>& requests;
  int device;
  std::uint32_t index;                   // of this rank among the prefill or the decode ranks
  std::atomic<std::uint64_t>& finished;  // requests finished in all families, for the progress bar
};

}  // namespace verbatim::kv
