// The private part of a completion queue; `shared` is its part in the segment.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <list>

#include "softverbs/engine/extensible.h"
#include "softverbs/engine/futex_mutex.h"
#include "softverbs/host/layout.h"

namespace verbatim::softverbs {

class Process;

struct Cq : Extensible<ibv_cq, ibv_cq_ex> {
  Process* process = nullptr;
  std::uint32_t index = 0;
  std::list<Cq*>::iterator listed;  // its entry of Context::cqs
  SharedCq* shared = nullptr;
  Cqe* ring = nullptr;
  std::atomic<std::uint32_t> users{0};
  std::atomic<std::uint32_t> empty_polls{0};
  FutexMutex poll_mutex;
  // For extended queues
  bool is_single_threaded = false;
  ibv_wc current{};
  std::uint64_t current_timestamp_ns = 0;
  std::uint32_t comp_events_delivered = 0;   // under ibv_cq::mutex
  std::uint32_t async_events_delivered = 0;  // under ibv_cq::mutex
};

}  // namespace verbatim::softverbs
