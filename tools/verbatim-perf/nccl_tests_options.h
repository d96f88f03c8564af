// What makes command lines of nccl-tests run: its programs' names, its options that Verbatim's table does not need, and
// those that have no meaning without NCCL and GPU kernels. The latter are accepted, with a note if they would change
// something there.
#pragma once

#include <string>
#include <vector>

#include "verbatim-perf/options.h"

namespace CLI {
class App;
}

namespace verbatim::perf {

// "all_reduce" for ".../all_reduce_perf". Empty: not a program of nccl-tests.
std::string operation_of_program(const std::string& path);

// The arguments after the name of the program. Two long options of nccl-tests have other meanings here; their values
// say which is meant: `--root 3` becomes `--root-rank 3`, `--memory 1` becomes `--memory_report 1`.
std::vector<std::string> arguments_of(int argc, const char* const* argv);

// Values as they are on the command line.
struct NcclTestsOptions {
  std::string reduction = "sum";
  std::string type = "float";
  int root = 0;
  int per_iteration = 0;
  int timestamps = 0;
};

// `notes` in `options` gets a line for each option that is accepted without effect. Both must live until the options
// are parsed.
void add_nccl_tests_options(CLI::App& app, Options& options, NcclTestsOptions& given);

// Completes `options` after the parsing, when the operation and the ranks are known. Throws Failure.
void take_nccl_tests_options(const CLI::App& app, const NcclTestsOptions& given, Options& options);

}  // namespace verbatim::perf
