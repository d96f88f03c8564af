#include "cli/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <sstream>

#include "base/edit_distance.h"
#include "base/version.h"

namespace verbatim::cli {
namespace {

constexpr std::size_t kMaxBytes = std::size_t{1} << 40;
// A name that differs in more characters, or in more than half of them, is not the one that was meant.
constexpr std::size_t kMaxDistance = 3;

// The subcommand that was given, or the program.
const CLI::App& chosen(const CLI::App& app) {
  const std::vector<CLI::App*> given = app.get_subcommands();
  return given.empty() ? app : chosen(*given.front());
}

std::string full_name(const CLI::App& app) {
  return app.get_parent() == nullptr ? app.get_name() : full_name(*app.get_parent()) + " " + app.get_name();
}

std::vector<std::string> names_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;  // for the program itself
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  for (const CLI::App* subcommand : app.get_subcommands(nullptr)) names.push_back(subcommand->get_name());
  return names;
}

// "Next: is --group meant? ", or nothing.
std::string suggestion(const CLI::App& app, const std::string& unknown) {
  const std::string name = unknown.substr(0, unknown.find('='));
  const std::vector<std::string> names = names_of(app);
  const auto nearest = std::min_element(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
    return edit_distance(name, a) < edit_distance(name, b);
  });
  if (nearest == names.end()) return {};
  const std::size_t distance = edit_distance(name, *nearest);
  return distance <= kMaxDistance && 2 * distance < name.size() ? "Next: is " + *nearest + " meant? " : std::string();
}

std::string error_line(const CLI::App& app, const std::string& what, const std::string& next = {}) {
  const std::string name = full_name(app);
  return name + ": " + what + ". " + next + "See " + name + " --help\n";
}

std::string error_line(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& part = chosen(app);
  // Said first: an option that is missing is often one whose name was not known.
  const std::vector<std::string> unknown = app.remaining(true);
  if (unknown.empty()) return error_line(part, error.what());
  return error_line(part, "unknown argument '" + unknown.front() + "'", suggestion(part, unknown.front()));
}

CLI::Option* as_sizes(CLI::Option* option) {
  return option->transform(CLI::AsSizeValue(false))->check(CLI::Range(std::size_t{0}, kMaxBytes))->type_name("SIZE");
}

}  // namespace

void print_error(const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, what.c_str());
}

std::optional<EarlyExit> parse(CLI::App& app, int argc, const char* const* argv, const std::function<void()>& check) {
  std::ostringstream out;
  app.footer(app.get_footer().empty() ? kExitStatuses : app.get_footer() + "\n\n" + kExitStatuses);
  app.set_version_flag("--version", version_text(app.get_name()), "print the version and exit");
  try {
    app.parse(argc, argv);
    check();
  } catch (const CLI::Success& asked) {  // --help and --version
    app.exit(asked, out, out);
    return EarlyExit{ExitStatus::kOk, out.str()};
  } catch (const CLI::ParseError& error) {
    return EarlyExit{ExitStatus::kUsage, error_line(app, error)};
  } catch (const Failure& failure) {
    return EarlyExit{failure.status, error_line(chosen(app), failure.what())};
  }
  return std::nullopt;
}

CLI::Option* add_size_option(CLI::App& app, const std::string& names, std::size_t& into, const std::string& help) {
  return as_sizes(app.add_option(names, into, help));
}

CLI::Option* add_sizes_option(CLI::App& app, const std::string& names, std::vector<std::size_t>& into,
                              const std::string& help) {
  return as_sizes(app.add_option(names, into, help)->delimiter(','));
}

int leave(const EarlyExit& early) {
  std::fputs(early.text.c_str(), early.status == ExitStatus::kOk ? stdout : stderr);
  return static_cast<int>(early.status);
}

}  // namespace verbatim::cli
