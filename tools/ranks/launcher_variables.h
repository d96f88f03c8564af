// The rank that a launcher (Open MPI, PMI, Slurm, torchrun) has given this process, from the launcher's environment
// variables.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace verbatim::ranks {

struct LaunchedRank {
  std::string launcher;  // for messages: "Open MPI"
  int rank = 0;
  int ranks = 0;
  bool one_host = false;  // all ranks are on this host
  std::string host = {};  // of rank 0; empty: the launcher does not say
  int port = 0;           // a free one there; 0: the launcher does not say
  std::string id = {};    // of this start, the same for all ranks; empty: the launcher does not say
};

// The value of a variable, nullptr when it is not set.
using Lookup = std::function<const char*(const char*)>;

// nullopt without a launcher, and when it has started only one process. Where launchers are nested (torchrun in a Slurm
// step), the innermost counts. Throws Failure for variables that contradict each other.
std::optional<LaunchedRank> launched_rank(const Lookup& lookup);

// Tells a start of a launcher from others, where the launcher has an ID for it.
std::string start_of(const LaunchedRank& launched);

// Where the ranks meet, in the form of ranks/meeting_point.h. Throws Failure when the launcher gives no address of rank
// 0 and ranks are on several hosts.
std::string meeting_point(const LaunchedRank& launched);

}  // namespace verbatim::ranks
