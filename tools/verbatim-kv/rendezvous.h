// Connects the control channels of the two sides: prefill ranks listen on one socket per family, and decode ranks
// connect to all of them.
#pragma once

#include <cstddef>
#include <vector>

#include "ranks/coordinator_connection.h"
#include "ranks/job.h"
#include "verbatim-kv/channel.h"

namespace verbatim::kv {

// Returns the channels by family, then by index of the peer on its side. All ranks call it at the same time; the ranks
// below `prefills` are the prefill ranks. Throws Failure.
std::vector<std::vector<Channel>> connect_channels(const ranks::Job& job, ranks::CoordinatorConnection& coordinator,
                                                   std::size_t families, int prefills);

}  // namespace verbatim::kv
