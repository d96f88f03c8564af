// Starts the ranks of a job on this machine and waits for them.
#pragma once

#include "ranks/failure.h"
#include "ranks/job.h"

namespace verbatim::ranks {

// Runs `job.procs` copies of this program with the arguments `argv`, and the coordinator for them.
ExitStatus launch(const Job& job, int argc, char** argv);

}  // namespace verbatim::ranks
