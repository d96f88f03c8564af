#include "ranks/job.h"
#include "verbatim-kv/compare.h"
#include "verbatim-kv/isolation.h"
#include "verbatim-kv/nixl_run.h"
#include "verbatim-kv/options.h"
#include "verbatim-kv/rank.h"

using namespace verbatim;

namespace {

ranks::ExitStatus run(const kv::Options& options, int argc, char** argv) {
  if (!options.compare.empty()) return kv::run_compare(options, argc, argv);
  if (options.mode == kv::Mode::kNixl) return kv::run_over_nixl(options);
  if (options.isolation) return kv::run_isolation(options, argc, argv);
  return ranks::run_job(options.job, argc, argv, [&options](ranks::CoordinatorConnection& coordinator) {
    return kv::make_rank(options, coordinator);
  });
}

}  // namespace

int main(int argc, char** argv) {
  return cli::run_or_exit(kv::parse_options(argc, argv),
                          [&](const kv::Options& options) { return run(options, argc, argv); });
}
