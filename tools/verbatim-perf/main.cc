#include <cstring>

#include "ranks/job.h"
#include "verbatim-perf/compare.h"
#include "verbatim-perf/cost/options.h"
#include "verbatim-perf/options.h"
#include "verbatim-perf/qp_order/options.h"
#include "verbatim-perf/rank.h"

using namespace verbatim;

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "cost") == 0) {
    return ranks::run_or_exit(perf::cost::parse_cost_options(argc - 1, argv + 1), perf::cost::run_cost);
  }
  if (argc > 1 && std::strcmp(argv[1], "qp-order") == 0) {
    return ranks::run_or_exit(perf::qp_order::parse_qp_order_options(argc - 1, argv + 1), perf::qp_order::run_qp_order);
  }
  return ranks::run_or_exit(perf::parse_options(argc, argv), [&](const perf::Options& options) {
    if (!options.compare.empty()) return perf::run_compare(options, argc, argv);
    return ranks::run_job(options.job, argc, argv, [&options](ranks::CoordinatorConnection& coordinator) {
      return perf::make_rank(options, coordinator);
    });
  });
}
