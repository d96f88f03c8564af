// Starts the ranks of a job on this host and waits for them.
#pragma once

#include <vector>

#include "base/unique_fd.h"
#include "ranks/failure.h"
#include "ranks/job.h"

namespace verbatim::ranks {

// Runs `job.procs` copies of this program with the arguments `argv` and meets them.
ExitStatus launch(const Job& job, int argc, char** argv);

// A listening socket at 127.0.0.1, or at any address when `port` is not 0. Throws Failure.
UniqueFd listen_for_ranks(int port);
// The port of HOST:PORT. Throws Failure.
int port_of(const std::string& root);

}  // namespace verbatim::ranks
