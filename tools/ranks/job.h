// Which rank of which job a process is, and how a job starts: this program starts all ranks on this machine, or ranks
// that were started separately (by mpirun, srun, torchrun, or by hand with --root) meet at rank 0.
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
  std::string root;    // where the coordinator listens (ranks/meeting_point.h); empty: this process starts the ranks
  int rank = 0;        // with root
  int nranks = 0;      // with root
  bool child = false;  // with root: started by a launcher, which runs the coordinator
  int timeout_s = kDefaultTimeoutS;
  std::string start = {};  // of a launcher that gave the root (start_of()); empty: none

  int size() const { return root.empty() ? procs : nranks; }
};

// The work of one rank. After a failure it is destroyed only when the other ranks were notified, so that they report
// the failure and not a graceful close of the peer.
class Rank {
 public:
  Rank() = default;
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  virtual ~Rank() = default;

  // Throws Failure for what fails. Before it returns another status than kOk it has printed the reason.
  virtual ExitStatus run() = 0;
};
using MakeRank = std::function<std::unique_ptr<Rank>(CoordinatorConnection&)>;

// In the launcher: starts `job.procs` copies of this program with the arguments `argv` and the options that make each
// of them a rank, and runs the coordinator. In such a copy or with --root: runs the rank that `make` creates.
ExitStatus run_job(const Job& job, int argc, char** argv, const MakeRank& make);

}  // namespace verbatim::ranks
