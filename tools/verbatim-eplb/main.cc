#include "ranks/job.h"
#include "verbatim-eplb/compare.h"
#include "verbatim-eplb/injection.h"
#include "verbatim-eplb/input.h"
#include "verbatim-eplb/nixl_run.h"
#include "verbatim-eplb/options.h"
#include "verbatim-eplb/plan_only.h"
#include "verbatim-eplb/posting.h"
#include "verbatim-eplb/rank.h"

using namespace verbatim;

namespace {

ranks::ExitStatus run(const eplb::Options& options, int argc, char** argv) {
  try {
    if (options.plan_only) {
      eplb::print_plan(stdout, options);
      return ranks::ExitStatus::kOk;
    }
    // Checks the input in the launcher, so that an error is printed once and not by every rank.
    if (options.job.root.empty()) {
      const eplb::Input input = eplb::make_input(options);
      static_cast<void>(eplb::place_injection(options, input, eplb::plan_layers(options, input)));
    }
  } catch (const eplb::BadInput& bad) {
    throw ranks::Failure(bad.what(), ranks::ExitStatus::kUsage);
  }
  if (!options.compare.empty() && options.job.root.empty()) return eplb::run_compare(options, argc, argv);
  if (options.over == eplb::Over::kNixl) return eplb::run_over_nixl(options);
  return ranks::run_job(options.job, argc, argv, [&options](ranks::CoordinatorConnection& coordinator) {
    return eplb::make_rank(options, coordinator);
  });
}

}  // namespace

int main(int argc, char** argv) {
  return cli::run_or_exit(eplb::parse_options(argc, argv),
                          [&](const eplb::Options& options) { return run(options, argc, argv); });
}
