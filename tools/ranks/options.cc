#include "ranks/options.h"

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "ranks/launcher_variables.h"
#include "ranks/meeting_point.h"

namespace verbatim::ranks {
void add_job_options(CLI::App& app, Job& job, const char* procs) {
  app.add_option(procs, job.procs, "number of ranks to start on this machine")
      ->check(CLI::Range(1, kMaxRanks))
      ->capture_default_str();
  app.add_option("--root", job.root,
                 "for several hosts: the address at which rank 0 listens for the others. Ranks that mpirun, srun or "
                 "torchrun has started take it from there if they can (srun, torchrun, MASTER_ADDR, all ranks on one "
                 "host). All ranks need the same VERBATIM_TOKEN in the environment, a secret of 16 characters or more")
      ->type_name("HOST:PORT");
  app.add_option("--rank", job.rank, "with --root: the number of this rank; default: the launcher's")
      ->check(CLI::Range(0, kMaxRanks - 1));
  app.add_option("--nranks", job.nranks, "with --root: the number of ranks; default: the launcher's")
      ->check(CLI::Range(1, kMaxRanks));
  app.add_option("-T,--timeout", job.timeout_s, "the seconds after which all ranks are stopped; 0: none")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  app.add_flag("--child", job.child)->group("");
}

namespace {

void take_launched(const CLI::App& app, const LaunchedRank& launched, Job& job) {
  const std::string started = launched.launcher + " has started " + std::to_string(launched.ranks) + " ranks";
  if (app.count("--procs") > 0) {
    throw Failure(started + ", and --procs would start more in each of them. Next: leave --procs out",
                  ExitStatus::kUsage);
  }
  if (launched.ranks > kMaxRanks) {
    throw Failure(started + "; the maximum is " + std::to_string(kMaxRanks), ExitStatus::kUsage);
  }
  job.rank = launched.rank;
  job.nranks = launched.ranks;
  if (!job.root.empty()) return check_meeting_point(job.root);
  job.root = meeting_point(launched);
  job.start = start_of(launched);
}

}  // namespace

void complete_job(const CLI::App& app, Job& job) {
  if (job.timeout_s == 0) job.timeout_s = kNoTimeoutS;
  const bool has_rank = app.count("--rank") > 0;
  const bool has_nranks = app.count("--nranks") > 0;
  if (!has_rank && !has_nranks) {
    if (const auto launched = launched_rank(::getenv)) return take_launched(app, *launched, job);
  }
  if (job.root.empty()) {
    if (has_rank || has_nranks) throw Failure("--rank and --nranks need --root", ExitStatus::kUsage);
    return;
  }
  check_meeting_point(job.root);
  if (app.count("--procs") > 0 && !job.child) {
    throw Failure(
        "--procs and --root exclude each other: --procs starts ranks on this machine, --root joins ranks that are "
        "started separately",
        ExitStatus::kUsage);
  }
  if (!has_rank || !has_nranks) {
    throw Failure("--root needs --rank and --nranks, or a launcher (mpirun, srun, torchrun)", ExitStatus::kUsage);
  }
  if (job.rank >= job.nranks) throw Failure("--rank must be below --nranks", ExitStatus::kUsage);
}

}  // namespace verbatim::ranks
