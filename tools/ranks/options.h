// The command-line options that all tools that run ranks have in common.
#pragma once

#include "cli/command_line.h"
#include "ranks/failure.h"
#include "ranks/job.h"

namespace verbatim::ranks {

// Adds --root, --rank, --nranks, --timeout, and the number of ranks to start here under the names `procs`.
void add_job_options(CLI::App& app, Job& job, const char* procs = "--procs,--ranks");
// After parsing: sets in `job` what a launcher (mpirun, srun, torchrun) has given this process. Throws Failure when the
// job options contradict each other or the launcher.
void complete_job(const CLI::App& app, Job& job);

}  // namespace verbatim::ranks
