// verbatim-info: what Verbatim would do on this host, without NCCL and without a second rank; with --pairs, which hosts
// of a job reach each other.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/config.h"
#include "cli/command_line.h"
#include "ranks/options.h"
#include "verbatim-info/pairs.h"
#include "verbatim-info/report.h"
#include "verbatim-info/text.h"

namespace {

using namespace verbatim::info;
using verbatim::cli::ExitStatus;

constexpr const char* kDescription =
    "Prints what Verbatim would do on this host, in the environment of the job: libraries, every RDMA device and port\n"
    "(used, or why not and what to do), GIDs, limits, the side channel, and every setting with its origin. Needs\n"
    "neither NCCL nor another rank. With --pairs: which hosts of a job reach each other, port by port, and how fast.";
constexpr unsigned kMaxRanks = 1U << 20;
constexpr unsigned kMaxChannels = 1024;

ExitStatus report(const std::optional<JobSize>& job, const std::string& root, bool as_json) {
  const nlohmann::ordered_json report = make_report(job, root);
  // Names of files and values of settings can be bytes that are not UTF-8.
  const std::string text =
      as_json ? report.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n" : to_text(report);
  std::fputs(text.c_str(), stdout);
  return report["init"]["succeeds"].get<bool>() ? ExitStatus::kOk : ExitStatus::kWrong;
}

}  // namespace

int main(int argc, char** argv) {
  JobSize size;
  PairOptions pairs;
  bool as_json = false;
  bool tests_pairs = false;
  bool list_variables = false;
  std::string root;
  CLI::App app(kDescription, "verbatim-info");
  app.add_flag("--json", as_json, "print one JSON object instead of text");
  CLI::Option* const ranks = app.add_option("--ranks", size.ranks,
                                            "forecast the QPs, registered memory and descriptors of one rank of a job "
                                            "with N ranks, each on another host")
                                 ->check(CLI::Range(2U, kMaxRanks))
                                 ->type_name("N");
  app.add_option("--channels", size.channels, "NCCL's channels in this forecast")
      ->needs(ranks)
      ->check(CLI::Range(1U, kMaxChannels))
      ->capture_default_str()
      ->type_name("C");
  app.add_option("--host-files", root)->group("");  // for tests
  app.add_flag("--variables", list_variables, "print the table of all settings (Markdown) and exit");
  CLI::Option* const pairs_flag =
      app.add_flag(
             "--pairs", tests_pairs,
             "start one rank on each host (mpirun, srun, torchrun): each port is connected to the port with the same "
             "index of every other host, and latency and bandwidth are measured; rank 0 prints what is wrong")
          ->excludes(ranks);
  app.add_option("--plugin", pairs.plugin, "with --pairs: path or name of the net plugin")
      ->needs(pairs_flag)
      ->capture_default_str()
      ->type_name("PATH");
  verbatim::ranks::add_job_options(app, pairs.job, "--procs");
  const auto early = verbatim::cli::parse(app, argc, argv, [&] {
    if (!tests_pairs) return;
    verbatim::ranks::complete_job(app, pairs.job);
    pairs.as_json = as_json;
  });
  if (early) return verbatim::cli::leave(*early);
  if (list_variables) {
    std::fputs(verbatim::variables_markdown().c_str(), stdout);
    return 0;
  }
  if (tests_pairs) {
    return verbatim::cli::run_or_report([&] {
      return verbatim::ranks::run_job(pairs.job, argc, argv, [&](verbatim::ranks::CoordinatorConnection& coordinator) {
        return make_pair_rank(pairs, coordinator);
      });
    });
  }
  return verbatim::cli::run_or_report(
      [&] { return report(ranks->count() != 0 ? std::optional(size) : std::nullopt, root, as_json); });
}
