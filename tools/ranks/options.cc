#include "ranks/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <map>
#include <sstream>

#include "base/version.h"
#include "ranks/launcher_variables.h"
#include "ranks/meeting_point.h"

namespace verbatim::ranks {
namespace {

constexpr std::size_t kMaxBytes = std::size_t{1} << 40;

}  // namespace

void add_job_options(CLI::App& app, Job& job) {
  app.add_option("--procs,--ranks", job.procs, "number of ranks to start on this machine")
      ->check(CLI::Range(1, kMaxRanks))
      ->capture_default_str();
  app.add_option("--root", job.root,
                 "for several hosts: the address at which rank 0 listens for the others. Ranks that mpirun, srun or "
                 "torchrun has started take it from there if they can (srun, torchrun, MASTER_ADDR, all ranks on one "
                 "host)")
      ->type_name("HOST:PORT");
  app.add_option("--rank", job.rank, "with --root: the number of this rank; default: the launcher's")
      ->check(CLI::Range(0, kMaxRanks - 1));
  app.add_option("--nranks", job.nranks, "with --root: the number of ranks; default: the launcher's")
      ->check(CLI::Range(1, kMaxRanks));
  app.add_option("-T,--timeout", job.timeout_s, "the seconds after which all ranks are stopped")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--token", job.token, "with --root: a number that is the same for all ranks of the job");
  app.add_flag("--child", job.child)->group("");
}

namespace {

void take_launched(const CLI::App& app, const LaunchedRank& launched, Job& job) {
  const std::string started = launched.launcher + " has started " + std::to_string(launched.ranks) + " ranks";
  if (app.count("--procs") > 0) {
    throw Failure(started + ", and --procs would start more in each of them. Next: leave --procs out",
                  ExitStatus::kUsage);
  }
  if (launched.ranks > kMaxRanks) {
    throw Failure(started + "; the maximum is " + std::to_string(kMaxRanks), ExitStatus::kUsage);
  }
  job.rank = launched.rank;
  job.nranks = launched.ranks;
  if (!job.root.empty()) return check_meeting_point(job.root);
  job.root = meeting_point(launched);
  if (app.count("--token") == 0) job.token = token(launched);
}

}  // namespace

void complete_job(const CLI::App& app, Job& job) {
  const bool has_rank = app.count("--rank") > 0;
  const bool has_nranks = app.count("--nranks") > 0;
  if (!has_rank && !has_nranks) {
    if (const auto launched = launched_rank(::getenv)) return take_launched(app, *launched, job);
  }
  if (job.root.empty()) {
    if (app.count("--token") > 0) throw Failure("--token needs --root", ExitStatus::kUsage);
    if (has_rank || has_nranks) throw Failure("--rank and --nranks need --root", ExitStatus::kUsage);
    return;
  }
  check_meeting_point(job.root);
  if (app.count("--procs") > 0 && !job.child) {
    throw Failure(
        "--procs and --root exclude each other: --procs starts ranks on this machine, --root joins ranks that are "
        "started separately",
        ExitStatus::kUsage);
  }
  if (!has_rank || !has_nranks) {
    throw Failure("--root needs --rank and --nranks, or a launcher (mpirun, srun, torchrun)", ExitStatus::kUsage);
  }
  if (job.rank >= job.nranks) throw Failure("--rank must be below --nranks", ExitStatus::kUsage);
}

std::optional<EarlyExit> parse(CLI::App& app, int argc, const char* const* argv, const std::function<void()>& check) {
  std::ostringstream out;
  std::ostringstream err;
  app.failure_message([](const CLI::App*, const CLI::Error& wrong) { return std::string(wrong.what()) + "\n"; });
  app.set_version_flag("--version", version_text(app.get_name()), "print the version and exit");
  try {
    app.parse(argc, argv);
    check();
  } catch (const CLI::ParseError& leave) {
    const bool asked_for = app.exit(leave, out, err) == 0;
    return EarlyExit{asked_for ? ExitStatus::kOk : ExitStatus::kUsage, asked_for ? out.str() : err.str()};
  } catch (const Failure& failure) {
    return EarlyExit{failure.status, std::string(failure.what()) + "\n"};
  }
  return std::nullopt;
}

std::size_t parse_bytes(const std::string& text) {
  const auto not_a_size = [&text] {
    return Failure("not a size: '" + text + "' (examples: 8, 64K, 1.5M, 2G)", ExitStatus::kUsage);
  };
  if (text.empty() || (std::isdigit(static_cast<unsigned char>(text[0])) == 0 && text[0] != '.')) throw not_a_size();
  double number = 0;
  std::size_t end = 0;
  try {
    number = std::stod(text, &end);
  } catch (const std::exception&) {
    throw not_a_size();
  }
  static const std::map<std::string, double> kUnits{
      {"", 1}, {"K", 1024}, {"M", 1024.0 * 1024}, {"G", 1024.0 * 1024 * 1024}};
  std::string unit = text.substr(end);
  std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return std::toupper(c); });
  if (unit.size() > 1 && unit.ends_with("IB")) unit.resize(unit.size() - 2);
  if (unit.ends_with("B")) unit.resize(unit.size() - 1);
  const auto known = kUnits.find(unit);
  if (known == kUnits.end()) throw not_a_size();
  const double bytes = number * known->second;
  if (!(bytes <= static_cast<double>(kMaxBytes)) || std::floor(bytes) != bytes) throw not_a_size();
  return static_cast<std::size_t>(bytes);
}

void add_size_option(CLI::App& app, const std::string& names, std::size_t& into, const std::string& help) {
  app.add_option_function<std::string>(
         names,
         [&into](const std::string& text) {
           try {
             into = parse_bytes(text);
           } catch (const Failure& failure) {
             throw CLI::ValidationError(failure.what());
           }
         },
         help)
      ->type_name("SIZE");
}

}  // namespace verbatim::ranks
