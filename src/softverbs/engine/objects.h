// The small objects behind a program's handles: protection domains, memory regions, completion channels. The verb that
// creates an object allocates it, and the verb that destroys it frees it.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>

#include "softverbs/engine/event_pipe.h"
#include "softverbs/host/mapping.h"

namespace verbatim::softverbs {

struct Pd : ibv_pd {
  std::atomic<std::uint32_t> users{0};
};

struct Mr : ibv_mr {
  std::uint32_t index = 0;
  bool is_pinned = true;  // it counts against RLIMIT_MEMLOCK
  Mapping dmabuf;         // of a region registered by a descriptor that is mapped
};

struct Channel : ibv_comp_channel {
  EventPipe pipe;
};

}  // namespace verbatim::softverbs
