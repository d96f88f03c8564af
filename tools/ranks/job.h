// Which rank of which job a process is, and how a job comes about: all its ranks started here, or one on each host.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ranks/coordinator_connection.h"
#include "ranks/failure.h"

namespace verbatim::ranks {

constexpr int kMaxRanks = 256;

struct Job {
  int procs = 2;
  std::string root;         // HOST:PORT where rank 0 meets the others; empty: we start all ranks here
  int rank = 0;             // with root
  int nranks = 0;           // with root
  std::uint64_t token = 0;  // with root: tells the ranks of one job from strangers
  bool child = false;       // with root: rank of a launcher, which does the meeting itself
  int timeout_s = 300;

  int size() const { return root.empty() ? procs : nranks; }
};

// What runs as one rank. Destroyed after the others were told of its failure, so that a plugin's good-bye to its peers
// does not come first.
class Rank {
 public:
  Rank() = default;
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  virtual ~Rank() = default;

  // Failure is what went wrong here; with another status than kOk all is told by what was printed.
  virtual ExitStatus run() = 0;
};
using MakeRank = std::function<std::unique_ptr<Rank>(CoordinatorConnection&)>;

// Starts `job.procs` copies of this program with the arguments `argv`, each with the options of Job that make it a
// rank, and meets them; or, in such a copy or with --root, runs the rank that `make` makes.
ExitStatus run_job(const Job& job, int argc, char** argv, const MakeRank& make);

}  // namespace verbatim::ranks
