#include "verbatim-perf/nccl_tests_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <string_view>

namespace verbatim::perf {
namespace {

using workload::ElementType;
using workload::ReductionKind;

constexpr const char* kGroup = "Options of nccl-tests";
constexpr const char* kAll = "all";
constexpr std::string_view kProgramSuffix = "_perf";
constexpr int kMaxUnalign = 511;  // elements of 8 bytes in a page

struct IgnoredOption {
  const char* names;
  const char* default_value;  // nccl-tests'
  const char* reason;
};

constexpr IgnoredOption kIgnored[] = {
    {"-m,--agg_iters", "1", "iterations are not aggregated"},
    {"-p,--parallel_init", "0", "every rank is a process"},
    {"-z,--blocking", "0", "each iteration always waits for its end"},
    {"-y,--stream_null", "0", "there are no streams"},
    {"-G,--cudagraph", "0", "there are no CUDA graphs"},
    {"-C,--report_cputime", "0", "the CPU does all the work: its time is the time"},
    {"-R,--local_register", "0", "all buffers are registered"},
    {"-x,--cta_policy", "-1", "there are no GPU kernels"},
    {"-D,--device_implementation", "0", "there are no GPU kernels"},
    {"-V,--device_cta_count", "16", "there are no GPU kernels"},
    {"-M,--memory_report", "0", "NCCL, whose GPU memory it reports, is not used"},
};

bool is_number(const std::string& text) {
  const std::size_t first = text.starts_with('-') ? 1 : 0;
  return text.size() > first && text.find_first_not_of("0123456789", first) == std::string::npos;
}

template <typename T>
std::vector<T> first_values(std::size_t count) {
  std::vector<T> values;
  for (std::size_t i = 0; i < count; ++i) values.push_back(static_cast<T>(i));
  return values;
}

// The values with this name: one, or for "all" all.
template <typename T, typename Name>
std::vector<T> named(const std::vector<T>& all, const std::string& name, const Name& name_of) {
  std::vector<T> values = all;
  std::erase_if(values, [&](T value) { return name != kAll && name != name_of(value); });
  return values;
}

template <typename T, typename Name>
std::vector<std::string> names_of(const std::vector<T>& all, const Name& name_of) {
  std::vector<std::string> names;
  for (const T value : all) names.emplace_back(name_of(value));
  names.emplace_back(kAll);
  return names;
}

const std::vector<ElementType>& all_types() {
  static const auto all = first_values<ElementType>(workload::kElementTypes);
  return all;
}

const std::vector<ReductionKind>& all_reductions() {
  static const auto all = first_values<ReductionKind>(workload::kReductionKinds);
  return all;
}

bool adds(ReductionKind kind) {
  return kind == ReductionKind::kSum || kind == ReductionKind::kAvg || kind == ReductionKind::kMulSum;
}

// Types of few bits have no exact sums of many ranks. nccl-tests leaves them out of "all" where a GPU has not got them.
void check_types(const NcclTestsOptions& given, Options& options) {
  if (!reduces(options.operation) || std::ranges::none_of(options.reductions, adds)) return;
  const auto is_inexact = [&](ElementType type) { return options.job.size() > workload::max_exact_ranks(type); };
  for (const ElementType type : options.types) {
    if (!is_inexact(type)) continue;
    const std::string reason = std::string("the sum of ") + workload::element_name(type) + " is exact for at most " +
                               std::to_string(workload::max_exact_ranks(type)) + " ranks";
    if (given.type != kAll) {
      throw Failure(reason + ". Next: use fewer ranks or another type", ExitStatus::kUsage);
    }
    options.notes.push_back(std::string("-d all leaves out ") + workload::element_name(type) + ": " + reason);
  }
  std::erase_if(options.types, is_inexact);
}

void take_roots(const CLI::App& app, const NcclTestsOptions& given, Options& options) {
  if (!has_root(options.operation)) {
    if (app.count("-r") > 0) options.notes.emplace_back("-r,--root has no effect: the operation has no root");
    return;
  }
  if (given.root >= options.job.size()) {
    throw Failure("-r " + std::to_string(given.root) + ": there are only " + std::to_string(options.job.size()) +
                      " ranks. Next: give one of them, or -1 for all in turn",
                  ExitStatus::kUsage);
  }
  options.roots = {given.root};
  if (given.root < 0) options.roots = first_values<int>(static_cast<std::size_t>(options.job.size()));
}

// What NCCL_TESTS_MIN_BW says; -1: nothing.
double required_busbw() {
  const char* const text = std::getenv("NCCL_TESTS_MIN_BW");
  if (text == nullptr || *text == '\0') return -1;
  char* end = nullptr;
  const double busbw = std::strtod(text, &end);
  if (*end != '\0' || !std::isfinite(busbw)) {
    throw Failure(std::string("NCCL_TESTS_MIN_BW=") + text + " is not a number. Next: set it to GB/s, or unset it",
                  ExitStatus::kUsage);
  }
  return busbw;
}

}  // namespace

std::string operation_of_program(const std::string& path) {
  const std::string name = path.substr(path.rfind('/') + 1);
  if (!name.ends_with(kProgramSuffix)) return {};
  return name.substr(0, name.size() - kProgramSuffix.size());
}

std::vector<std::string> arguments_of(int argc, const char* const* argv) {
  std::vector<std::string> arguments(argv + std::min(argc, 1), argv + argc);
  const std::map<std::string, std::string> renamed{{"--root", "--root-rank"}, {"--memory", "--memory_report"}};
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    std::string& argument = arguments[i];
    const std::size_t end = argument.find('=');
    const auto found = renamed.find(argument.substr(0, end));
    if (found == renamed.end()) continue;
    const bool has_value = end != std::string::npos;
    if (!has_value && i + 1 == arguments.size()) continue;
    const std::string value = has_value ? argument.substr(end + 1) : arguments[i + 1];
    if (!is_number(value)) continue;
    argument = found->second + (has_value ? "=" + value : "");
  }
  return arguments;
}

void add_nccl_tests_options(CLI::App& app, Options& options, NcclTestsOptions& given) {
  const auto in_group = [](CLI::Option* option, const char* type) { option->group(kGroup)->type_name(type); };
  app.add_option("-d,--datatype", given.type, "type of the elements; all: each in turn")
      ->check(CLI::IsMember(names_of(all_types(), workload::element_name)))
      ->capture_default_str();
  app.add_option("-o,--op", given.reduction, "how all_reduce, reduce_scatter and reduce reduce; all: each way in turn")
      ->check(CLI::IsMember(names_of(all_reductions(), workload::reduction_name)))
      ->capture_default_str();
  in_group(app.add_option("-r,--root-rank", given.root,
                          "root of broadcast, reduce, gather and scatter; -1: each rank in turn (in nccl-tests --root)")
               ->check(CLI::Range(-1, ranks::kMaxRanks - 1)),
           "RANK");
  in_group(app.add_option("-N,--run_cycles", options.cycles,
                          "how often all sizes run; 0: until the timeout (-T), without closing lines")
               ->check(CLI::Range(0, 1'000'000'000)),
           "N");
  in_group(app.add_option("-u,--unalign", options.unalign, "elements by which the buffers begin behind a page boundary")
               ->check(CLI::Range(0, kMaxUnalign)),
           "N");
  in_group(app.add_option("-I,--per_iter_timing", given.per_iteration,
                          "1: minimum, maximum, p99 and variation of the iterations, each of its slowest rank")
               ->check(CLI::Range(0, 1)),
           "0|1");
  in_group(
      app.add_option("-K,--per_iter_skip", options.per_iteration_skip, "with -I: first iterations that it leaves out")
          ->check(CLI::Range(0, 1'000'000'000)),
      "N");
  in_group(app.add_option("-S,--report_timestamps", given.timestamps, "1: each row ends with the time of day")
               ->check(CLI::Range(0, 1)),
           "0|1");
  in_group(app.add_option("-J,--output_file", options.nccl_tests_json,
                          "write nccl-tests' JSON to this file, if its name ends with .json"),
           "FILE");
  for (const IgnoredOption& option : kIgnored) {
    const auto take = [&option, &options](const std::string& value) {
      if (!is_number(value)) throw CLI::ValidationError(std::string(option.names) + " " + value + " is not a number");
      if (value == option.default_value) return;
      options.notes.push_back(std::string(option.names) + " " + value + " has no effect: " + option.reason);
    };
    in_group(app.add_option_function<std::string>(option.names, take, std::string("no effect: ") + option.reason), "N");
  }
}

void take_nccl_tests_options(const CLI::App& app, const NcclTestsOptions& given, Options& options) {
  options.types = named(all_types(), given.type, workload::element_name);
  options.reductions = named(all_reductions(), given.reduction, workload::reduction_name);
  options.per_iteration = given.per_iteration != 0;
  options.timestamps = given.timestamps != 0;
  take_roots(app, given, options);
  check_types(given, options);
  if (!shows_reduction(options.operation)) {
    if (given.reduction != "sum") options.notes.emplace_back("-o,--op has no effect: the operation does not reduce");
    options.reductions = {ReductionKind::kSum};
  }
  const auto refuse = [&](bool given_option, const char* why) {
    if (given_option) throw Failure(why, ExitStatus::kUsage);
  };
  const bool has_columns = options.format == Format::kNcclTests;
  if (has_columns) options.required_busbw = required_busbw();
  refuse(options.per_iteration && !has_columns, "-I adds columns to nccl-tests' table. Next: --format nccl-tests");
  refuse(options.timestamps && !has_columns, "-S adds a column to nccl-tests' table. Next: --format nccl-tests");
  refuse(!options.nccl_tests_json.empty() && !has_columns,
         "-J writes nccl-tests' table. Next: --format nccl-tests, or --json");
  refuse(options.per_iteration_skip > 0 && !options.per_iteration, "-K needs -I 1");
  refuse(options.per_iteration_skip >= options.iterations, "-K must be below -n");
  refuse(options.unalign > 0 && options.types.size() > 1, "-u counts elements of one type. Next: give one with -d");
  refuse(options.types.size() > 1 && is_put_operation(options.operation), "puts have one type. Next: give one with -d");
  const bool has_json = !options.json.empty() || !options.nccl_tests_json.empty();
  refuse(options.cycles == 0 && has_json,
         "-N 0 has no end at which --json or -J could be written. Next: give a number");
  const bool compares = !options.compare.empty();
  const bool has_lists = options.types.size() > 1 || options.reductions.size() > 1 || options.roots.size() > 1;
  refuse(compares && (has_lists || options.cycles != 1),
         "--compare has a line for each size only. Next: one value for -d, -o and -r, no -N, and --rounds to repeat");
  refuse(compares && !options.nccl_tests_json.empty(), "-J writes one run. Next: --json with --compare");
}

}  // namespace verbatim::perf
