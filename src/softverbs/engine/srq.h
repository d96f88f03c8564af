// The private part of a shared receive queue; `shared` is its part in the segment.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <list>

#include "softverbs/engine/receive_poster.h"
#include "softverbs/host/layout.h"

namespace verbatim::softverbs {

class Process;

struct Srq : ibv_srq {
  Process* process = nullptr;
  std::uint32_t index = 0;
  std::list<Srq*>::iterator listed;  // its entry of Context::srqs
  SharedSrq* shared = nullptr;
  ReceivePoster poster;
  std::atomic<std::uint32_t> users{0};
  std::uint32_t events_delivered = 0;  // under ibv_srq::mutex
};

}  // namespace verbatim::softverbs
