// softverbs stats: prints the counters of the running processes.
#include "softverbs/host/stats.h"

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/table.h"
#include "softverbs-control/subcommand.h"

namespace verbatim::control {
namespace {

using softverbs::ObjectKind;
using softverbs::ProcessStats;
using softverbs::QpStats;

struct StatsOptions {
  std::vector<pid_t> pids;
  bool json = false;
  bool qps = false;
};

void print_json(const std::vector<ProcessStats>& all) {
  auto list = nlohmann::ordered_json::array();
  for (const ProcessStats& stats : all) list.push_back(nlohmann::ordered_json::parse(softverbs::to_json(stats)));
  std::printf("%s\n", list.dump(1).c_str());
}

std::vector<cli::Cell> cells_of(const std::string& pid, const std::string& name, std::uint64_t calls,
                                std::uint64_t doorbells, const softverbs::WorkStats& work) {
  return {pid,
          name,
          calls,
          doorbells,
          work.send_requests(),
          work.receives,
          work.bytes,
          work.inline_bytes,
          work.completions};
}

void print_qp(const cli::Table& table, const QpStats& qp) {
  char name[32];
  std::snprintf(name, sizeof name, "qp 0x%06x %s", qp.qpn, softverbs::state_name(qp.state));
  const std::uint64_t doorbells = qp.work.doorbells();
  std::string more = table.row(cells_of("", name, qp.modifies + qp.queries + doorbells, doorbells, qp.work));
  if (qp.type != IBV_QPT_RC) more.append("   ").append(softverbs::type_name(qp.type));
  if (qp.path) more += "   path " + std::to_string(*qp.path);
  if (qp.udp_source_port != 0) more += ", UDP source port " + std::to_string(qp.udp_source_port);
  std::printf("%s\n", more.c_str());
}

// Objects are printed as created/alive: "2/1".
void print_table(const std::vector<ProcessStats>& all, bool with_qps) {
  const cli::Table table({{"PID", 10},
                          {"PROGRAM", -22},
                          {"CALLS", 10},
                          {"DOORBELLS", 11},
                          {"SENDS", 10},
                          {"RECVS", 10},
                          {"BYTES", 14},
                          {"INLINE", 12},
                          {"COMPLETIONS", 11},
                          {"POLLS", 12},
                          {"EMPTY", 12},
                          {"QPS", 9},
                          {"CQS", 9},
                          {"MRS", 9}});
  table.print_titles(stdout);
  for (const ProcessStats& stats : all) {
    std::vector<cli::Cell> cells =
        cells_of(std::to_string(stats.pid), stats.program, stats.total_calls(), stats.doorbells(), stats.work);
    cells.insert(cells.end(), {stats.polls, stats.empty_polls});
    for (const ObjectKind kind : {ObjectKind::kQp, ObjectKind::kCq, ObjectKind::kMr}) {
      const auto& objects = stats.of(kind);
      cells.emplace_back(std::to_string(objects.created) + "/" + std::to_string(objects.alive));
    }
    table.print_row(stdout, cells);
    if (!with_qps) continue;
    for (const QpStats& qp : stats.qps) print_qp(table, qp);
  }
}

ExitStatus show(ProcessDirectory& directory, const StatsOptions& options) {
  std::vector<ProcessStats> all;
  for (const TargetProcess& target : directory.processes(options.pids))
    all.push_back(softverbs::read_stats(target.segment()));
  if (options.json) {
    print_json(all);
  } else {
    print_table(all, options.qps);
  }
  return ExitStatus::kOk;
}

}  // namespace

Action declare_stats(CLI::App& arguments) {
  auto options = std::make_shared<StatsOptions>();
  arguments.add_option("pid", options->pids, "only these processes");
  arguments.add_flag("--json", options->json, "all counters as a JSON list of processes, instead of one line each");
  arguments.add_flag("--qps", options->qps, "also a line for each QP");
  arguments.footer(
      "Objects are printed as created/alive. The counters lie in shared memory: reading them does not delay the "
      "processes.\n"
      "With SOFTVERBS_STATS=FILE a process writes the same JSON when it ends; %p in FILE is replaced by its pid.");
  return [options](ProcessDirectory& directory) { return show(directory, *options); };
}

}  // namespace verbatim::control
