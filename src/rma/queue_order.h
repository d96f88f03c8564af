// The order in which the QPs of a set of contexts are created, and so that of their numbers: the NIC serves QPs by
// number. A pure function.
#pragma once

#include <cstddef>
#include <vector>

#include "base/config.h"

namespace verbatim::rma {

struct QueuePosition {
  std::size_t context = 0;
  std::size_t peer = 0;  // in ring order from oneself; `peers`: oneself
};

// Staggered: context k's QP to peer r has the position k * peers + r, so that neighbours in the order belong to
// different peers. Native: r * contexts + k, peer by peer. The QPs to oneself come last.
inline std::vector<QueuePosition> queue_order(std::size_t contexts, std::size_t peers, QpOrder order) {
  std::vector<QueuePosition> positions;
  positions.reserve(contexts * (peers + 1));
  const bool native = order == QpOrder::kNative;
  for (std::size_t outer = 0; outer < (native ? peers : contexts); ++outer) {
    for (std::size_t inner = 0; inner < (native ? contexts : peers); ++inner) {
      positions.push_back(native ? QueuePosition{inner, outer} : QueuePosition{outer, inner});
    }
  }
  for (std::size_t context = 0; context < contexts; ++context) positions.push_back({context, peers});
  return positions;
}

}  // namespace verbatim::rma
