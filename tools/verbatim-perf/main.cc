#include <cstdlib>
#include <cstring>
#include <string>

#include "ranks/job.h"
#include "ranks/launcher_variables.h"
#include "verbatim-perf/compare.h"
#include "verbatim-perf/cost/options.h"
#include "verbatim-perf/options.h"
#include "verbatim-perf/qp_order/options.h"
#include "verbatim-perf/rank.h"

using namespace verbatim;

namespace {

// Subcommands start their own processes: a launcher would run several of them side by side.
bool is_subcommand(int argc, char** argv, const char* name) {
  if (argc < 2 || std::strcmp(argv[1], name) != 0) return false;
  if (const auto launched = ranks::launched_rank(::getenv)) {
    throw ranks::Failure(std::string(name) + " starts its own processes, but " + launched->launcher + " has started " +
                             std::to_string(launched->ranks) +
                             " of it. Next: start it without mpirun, srun or torchrun",
                         ranks::ExitStatus::kUsage);
  }
  return true;
}

int run(int argc, char** argv) {
  if (is_subcommand(argc, argv, "cost")) {
    return cli::run_or_exit(perf::cost::parse_cost_options(argc - 1, argv + 1), perf::cost::run_cost);
  }
  if (is_subcommand(argc, argv, "qp-order")) {
    return cli::run_or_exit(perf::qp_order::parse_qp_order_options(argc - 1, argv + 1), perf::qp_order::run_qp_order);
  }
  return cli::run_or_exit(perf::parse_options(argc, argv), [&](const perf::Options& options) {
    if (!options.compare.empty()) return perf::run_compare(options, argc, argv);
    return ranks::run_job(options.job, argc, argv, [&options](ranks::CoordinatorConnection& coordinator) {
      return perf::make_rank(options, coordinator);
    });
  });
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const ranks::Failure& failure) {
    ranks::print_error(failure.what());
    return static_cast<int>(failure.status);
  }
}
