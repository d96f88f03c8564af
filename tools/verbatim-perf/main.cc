#include <cstdio>
#include <cstring>
#include <exception>
#include <variant>

#include "verbatim-perf/cost/options.h"
#include "verbatim-perf/launcher.h"
#include "verbatim-perf/options.h"
#include "verbatim-perf/qp_order/options.h"
#include "verbatim-perf/rank.h"

namespace {

using namespace verbatim::perf;

// `run` for options that were read, else what there is to say and the status to leave with.
template <typename Parsed, typename Run>
int run_or_leave(const Parsed& parsed, Run run) {
  if (const auto* const leave = std::get_if<Leave>(&parsed)) {
    std::fputs(leave->text.c_str(), leave->status == ExitStatus::kOk ? stdout : stderr);
    return static_cast<int>(leave->status);
  }
  return static_cast<int>(run(std::get<0>(parsed)));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc > 1 && std::strcmp(argv[1], "cost") == 0) {
      return run_or_leave(cost::parse_cost_options(argc - 1, argv + 1), cost::run_cost);
    }
    if (argc > 1 && std::strcmp(argv[1], "qp-order") == 0) {
      return run_or_leave(qp_order::parse_qp_order_options(argc - 1, argv + 1), qp_order::run_qp_order);
    }
    return run_or_leave(parse_options(argc, argv), [&](const Options& options) {
      return options.root.empty() ? launch(options, argc, argv) : run_rank(options);
    });
  } catch (const Failure& failure) {
    std::fprintf(stderr, "verbatim-perf: %s\n", failure.what());
    return static_cast<int>(failure.status);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "verbatim-perf: %s\n", failure.what());
    return static_cast<int>(ExitStatus::kFailed);
  }
}
