// verbatim-info --pairs: each host of a job connects to every other one over the plugin, port by port, and measures.
#pragma once

#include <memory>
#include <string>

#include "ranks/coordinator_connection.h"
#include "ranks/job.h"

namespace verbatim::info {

struct PairOptions {
  ranks::Job job;
  std::string plugin = "verbatim";  // path or name
  bool as_json = false;
};

// Rank 0 prints the report. Exit status kWrong when it has a finding.
std::unique_ptr<ranks::Rank> make_pair_rank(const PairOptions& options, ranks::CoordinatorConnection& coordinator);

}  // namespace verbatim::info
