// What the command lines of all tools have in common: --help and --version, the form of errors, sizes, exit statuses.
#pragma once

#include <cstddef>
#include <cstdio>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "cli/exit_status.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace verbatim::cli {

// Returned instead of options: print `text` and exit (help, version, or a wrong command line).
struct EarlyExit {
  ExitStatus status;
  std::string text;
};

// Adds --version and the exit statuses to the help, parses, then runs `check`, which may throw Failure. Returns nothing
// on success. The text of an error is one line: the program, what is wrong, the option that may be meant, and "see
// PROGRAM --help".
std::optional<EarlyExit> parse(
    CLI::App& app, int argc, const char* const* argv, const std::function<void()>& check = [] {});

// Options that take "8", "64K", "2G" (CLI::AsSizeValue: powers of 1,024, a trailing B or iB is allowed), at most 1 TiB.
CLI::Option* add_size_option(CLI::App& app, const std::string& names, std::size_t& into, const std::string& help);
CLI::Option* add_sizes_option(CLI::App& app, const std::string& names, std::vector<std::size_t>& into,
                              const std::string& help);

// Prints what EarlyExit contains. Returns the exit status.
int leave(const EarlyExit& early);

// The body of main(): calls `run`, which returns an ExitStatus, and prints the exceptions that it throws.
template <typename Run>
int run_or_report(const Run& run) {
  try {
    return static_cast<int>(run());
  } catch (const Failure& failure) {
    print_error(failure.what());
    return static_cast<int>(failure.status);
  } catch (const std::exception& failure) {
    print_error(failure.what());
    return static_cast<int>(ExitStatus::kFailed);
  }
}

// The same with the result of a function that parses options.
template <typename Options, typename Run>
int run_or_exit(const std::variant<Options, EarlyExit>& parsed, const Run& run) {
  if (const auto* const early = std::get_if<EarlyExit>(&parsed)) return leave(*early);
  return run_or_report([&] { return run(std::get<Options>(parsed)); });
}

}  // namespace verbatim::cli
