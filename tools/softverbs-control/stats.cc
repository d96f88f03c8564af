// softverbs stats: prints the counters of the running processes.
#include "softverbs/host/stats.h"

#include <cinttypes>
#include <cstdio>
#include <memory>

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
  std::printf("[");
  const char* separator = "\n";
  for (const ProcessStats& stats : all) {
    std::printf("%s%s", separator, softverbs::to_json(stats).c_str());
    separator = ",\n";
  }
  std::printf("\n]\n");
}

void print_qp(const QpStats& qp) {
  std::printf("%8s  qp 0x%06x %-9s %10" PRIu64 " %11" PRIu64 " %10" PRIu64 " %10" PRIu64 " %14" PRIu64 " %12" PRIu64
              " %11" PRIu64,
              "", qp.qpn, softverbs::state_name(qp.state), qp.modifies + qp.queries + qp.work.doorbells(),
              qp.work.doorbells(), qp.work.send_requests(), qp.work.receives, qp.work.bytes, qp.work.inline_bytes,
              qp.work.completions);
  if (qp.type != IBV_QPT_RC) std::printf("   %s", softverbs::type_name(qp.type));
  if (qp.path) std::printf("   path %u", *qp.path);
  if (qp.udp_source_port != 0) std::printf(", UDP source port %u", qp.udp_source_port);
  std::printf("\n");
}

// Objects are printed as created/alive: "2/1".
void print_table(const std::vector<ProcessStats>& all, bool with_qps) {
  std::printf("%8s  %-22s %10s %11s %10s %10s %14s %12s %11s %12s %12s %9s %9s %9s\n", "PID", "PROGRAM", "CALLS",
              "DOORBELLS", "SENDS", "RECVS", "BYTES", "INLINE", "COMPLETIONS", "POLLS", "EMPTY", "QPS", "CQS", "MRS");
  for (const ProcessStats& stats : all) {
    std::printf("%8d  %-22s %10" PRIu64 " %11" PRIu64 " %10" PRIu64 " %10" PRIu64 " %14" PRIu64 " %12" PRIu64
                " %11" PRIu64 " %12" PRIu64 " %12" PRIu64,
                stats.pid, stats.program.c_str(), stats.total_calls(), stats.doorbells(), stats.work.send_requests(),
                stats.work.receives, stats.work.bytes, stats.work.inline_bytes, stats.work.completions, stats.polls,
                stats.empty_polls);
    for (const ObjectKind kind : {ObjectKind::kQp, ObjectKind::kCq, ObjectKind::kMr}) {
      const auto& objects = stats.of(kind);
      std::printf(" %9s", (std::to_string(objects.created) + "/" + std::to_string(objects.alive)).c_str());
    }
    std::printf("\n");
    if (!with_qps) continue;
    for (const QpStats& qp : stats.qps) print_qp(qp);
  }
}

int show(ProcessDirectory& directory, const StatsOptions& options) {
  std::vector<ProcessStats> all;
  for (const TargetProcess& target : directory.processes(options.pids))
    all.push_back(softverbs::read_stats(target.segment()));
  if (options.json) {
    print_json(all);
  } else {
    print_table(all, options.qps);
  }
  return 0;
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
