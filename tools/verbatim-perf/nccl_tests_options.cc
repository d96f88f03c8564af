#include "verbatim-perf/nccl_tests_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>

namespace verbatim::perf {
namespace {

struct IgnoredOption {
  const char* names;
  const char* default_value;         // nccl-tests'
  std::vector<std::string> ignored;  // other values that change nothing here
  const char* reason;                // why they do not, or why other values are refused
  bool any_number = false;           // all numbers change nothing
};

const std::vector<IgnoredOption>& ignored_options() {
  static const std::vector<IgnoredOption> all{
      {"-o,--op", "sum", {}, "all_reduce sums, and the other operations do not reduce"},
      {"-r,--root-rank", "0", {"all"}, "no operation here has a root", true},
      {"-m,--agg_iters", "1", {}, "iterations are not aggregated"},
      {"-N,--run_cycles", "1", {}, "the sizes run once"},
      {"-p,--parallel_init", "0", {"1"}, "every rank is a process"},
      {"-z,--blocking", "0", {"1", "2"}, "each iteration always waits for its end"},
      {"-y,--stream_null", "0", {"1"}, "there are no streams"},
      {"-G,--cudagraph", "0", {}, "there are no CUDA graphs"},
      {"-C,--report_cputime", "0", {}, "the time of the CPU is not measured"},
      {"-R,--local_register", "0", {"1", "2"}, "all buffers are registered"},
      {"-x,--cta_policy", "0", {"1", "2"}, "there are no GPU kernels"},
      {"-D,--device_implementation", "0", {}, "there are no GPU kernels"},
      {"-V,--device_cta_count", "16", {}, "there are no GPU kernels"},
      {"-M,--memory_report", "0", {}, "memory is not reported"},
      {"-S,--report_timestamps", "0", {}, "rows have no time of day"},
      {"-J,--output_file", "", {}, "the JSON of nccl-tests is not written; use --json"},
  };
  return all;
}

std::string help_of(const IgnoredOption& option) {
  std::string values = *option.default_value == '\0' ? "none" : option.default_value;
  for (const std::string& value : option.ignored) values += ", " + value;
  return "of nccl-tests; accepted: " + values + " (" + option.reason + ")";
}

}  // namespace

void add_nccl_tests_options(CLI::App& app, std::vector<std::string>& notes) {
  for (const IgnoredOption& option : ignored_options()) {
    const auto take = [&option, &notes](const std::string& value) {
      if (value == option.default_value) return;
      const bool any = option.any_number && value.find_first_not_of("0123456789") == std::string::npos;
      if (!any && std::find(option.ignored.begin(), option.ignored.end(), value) == option.ignored.end()) {
        throw CLI::ValidationError(std::string(option.names) + " " + value + " is not supported: " + option.reason);
      }
      notes.push_back(std::string(option.names) + " " + value + " has no effect: " + option.reason);
    };
    app.add_option_function<std::string>(option.names, take, help_of(option))
        ->type_name("VALUE")
        ->group("Options of nccl-tests");
  }
}

}  // namespace verbatim::perf
