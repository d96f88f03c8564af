// The QPs of one lane to one rank, or to oneself: one for each context, and to oneself also that of flushes.
#pragma once

#include <cstdint>
#include <vector>

#include "base/config.h"
#include "base/result.h"
#include "rma/context_set.h"
#include "verbs/port.h"
#include "verbs/qp.h"
#include "wire/rma.h"

namespace verbatim::rma {

struct LaneQp {
  ibv_qp* qp = nullptr;
  std::uint32_t peer = 0;
  std::uint32_t lane = 0;
  std::uint32_t context = 0;
  bool is_for_flushes = false;
};

std::vector<LaneQp> lane_qps(const ContextSet& set, std::uint32_t peer, std::uint32_t lane);

// INIT -> RTS. `offer`: the peer's address now; nullptr: that of createContext. Not used for a QP to oneself.
Status connect_lane_qp(const ContextSet& set, const Config& config, const LaneQp& own, const Port& port,
                       const wire::RmaLane* offer, QpPsns psns);

}  // namespace verbatim::rma
