// What a comm needs to know of its surroundings. The context makes one for all of its comms; it outlives them.
#pragma once

#include <string>

#include "base/config.h"
#include "net/transfer/profiler_events.h"

namespace verbatim {

struct MemoryHandle;
template <typename Handle>
class Registrations;

struct CommSettings {
  const Config& config;
  const std::string& host_name;
  unsigned max_recvs = 1;                                // members of a grouped receive, as announced to NCCL
  Registrations<MemoryHandle>* registrations = nullptr;  // keeps what NCCL registers through these comms
  void* owner = nullptr;                                 // opaque: the plugin finds by it the context of a comm
  Profiler profiler = {};                                // without a callback: none
};

}  // namespace verbatim
