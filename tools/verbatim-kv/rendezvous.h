// How the two sides of each family find each other: the prefill ranks listen, one socket a family, the decode ranks
// connect to every one of them.
#pragma once

#include <cstddef>
#include <vector>

#include "ranks/coordinator_connection.h"
#include "ranks/job.h"
#include "verbatim-kv/channel.h"

namespace verbatim::kv {

// Channels by family, then by index of the peer on its side. All ranks call it at the same time; those below `prefills`
// are the prefill ranks. Throws Failure.
std::vector<std::vector<Channel>> connect_channels(const ranks::Job& job, ranks::CoordinatorConnection& coordinator,
                                                   std::size_t families, int prefills);

}  // namespace verbatim::kv
