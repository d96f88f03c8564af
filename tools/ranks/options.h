// The command-line options that all tools that run ranks have in common.
#pragma once

#include <cstddef>
#include <cstdio>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <variant>

#include "ranks/failure.h"
#include "ranks/job.h"

namespace CLI {
class App;
}

namespace verbatim::ranks {

// Returned instead of options: print `text` and exit (help, version, or a wrong command line).
struct EarlyExit {
  ExitStatus status;
  std::string text;
};

// Adds --procs (or --ranks), --root, --rank, --nranks, --timeout, --token.
void add_job_options(CLI::App& app, Job& job);
// After parsing: sets in `job` what a launcher (mpirun, srun, torchrun) has given this process. Throws Failure when the
// job options contradict each other or the launcher.
void complete_job(const CLI::App& app, Job& job);

// Parses, then runs `check`, which may throw Failure. Returns nothing on success.
std::optional<EarlyExit> parse(CLI::App& app, int argc, const char* const* argv, const std::function<void()>& check);

// Parses "8", "64K", "1.5M", "2G" (powers of 1,024; a trailing B or iB is allowed). Throws Failure.
std::size_t parse_bytes(const std::string& text);
void add_size_option(CLI::App& app, const std::string& names, std::size_t& into, const std::string& help);

// The body of main(): calls `run` with the parsed options, or prints what EarlyExit contains. Returns the exit status.
template <typename Options, typename Run>
int run_or_exit(const std::variant<Options, EarlyExit>& parsed, const Run& run) {
  if (const auto* const leave = std::get_if<EarlyExit>(&parsed)) {
    std::fputs(leave->text.c_str(), leave->status == ExitStatus::kOk ? stdout : stderr);
    return static_cast<int>(leave->status);
  }
  try {
    return static_cast<int>(run(std::get<Options>(parsed)));
  } catch (const Failure& failure) {
    print_error(failure.what());
    return static_cast<int>(failure.status);
  } catch (const std::exception& failure) {
    print_error(failure.what());
    return static_cast<int>(ExitStatus::kFailed);
  }
}

}  // namespace verbatim::ranks
