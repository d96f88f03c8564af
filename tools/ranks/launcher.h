// Starts the ranks of a job on this machine and waits for them.
#pragma once

#include <vector>

#include "base/unique_fd.h"
#include "ranks/failure.h"
#include "ranks/job.h"

namespace verbatim::ranks {

// Runs `job.procs` copies of this program with the arguments `argv`, and the coordinator for them.
ExitStatus launch(const Job& job, int argc, char** argv);

// A listening socket on 127.0.0.1 with a free port, or on all addresses when `port` is not 0. Throws Failure.
UniqueFd listen_for_ranks(int port);
// The port of HOST:PORT. Throws Failure.
int port_of(const std::string& root);

}  // namespace verbatim::ranks
