// What the connections of one process will need of the device and of the system, from the sizes by which connections
// are made. For verbatim-info.
#pragma once

#include <cstddef>

#include "base/config.h"
#include "net/connect/qp_planner.h"

namespace verbatim {

struct Forecast {
  std::size_t connections = 0;  // in both directions
  std::size_t qps = 0;
  std::size_t flush_qps = 0;         // besides, where GPU memory is flushed
  std::size_t memory_regions = 0;    // control memory; NCCL registers its buffers besides
  std::size_t registered_bytes = 0;  // of these; a device's driver may lock memory for its queues besides
  std::size_t descriptors = 0;       // besides those that init opens
};

// For `flows` to send to, and as many to receive from, on a device of `ports` ports at both ends; `announced` is what
// NCCL announces for each direction. Queue pairs that VERBATIM_QP_POOL adds are not counted.
Forecast forecast(const Config& config, std::size_t ports, std::size_t flows, const AnnouncedFlows& announced);

}  // namespace verbatim
