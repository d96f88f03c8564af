#include "verbatim-perf/qp_order/options.h"

#include <CLI/CLI.hpp>

#include "netapi/plugin.h"
#include "ranks/options.h"

namespace verbatim::perf::qp_order {
namespace {

constexpr const char* kDescription =
    "Measures the effect of the order of the queue pairs on the device in use. First it tests the premise: does the\n"
    "device serve its send queues by QP number? Then it runs an all-to-all between ranks in this process for each\n"
    "VERBATIM_QP_ORDER and prints how many QPs are at the right position, when each peer gets its first byte, how "
    "evenly\n"
    "peers are served until the first peer has all its bytes, and how many ranks send to one receiver at the same "
    "time.\n"
    "With softverbs' virtual clock (SOFTVERBS_LINK_GBPS) everything is posted while the clock is stopped, and the "
    "times\n"
    "come from its trace: the figures are the same in each run. On any other device the times are those of "
    "completions\n"
    "polled by one thread.";

constexpr int kMaxRanks = 64;
constexpr int kMaxFlows = 64;
constexpr int kMaxQps = 128;
constexpr int kMaxRounds = 1000;

}  // namespace

std::variant<QpOrderOptions, cli::EarlyExit> parse_qp_order_options(int argc, const char* const* argv) {
  QpOrderOptions options;
  options.orders = {"native", "staggered"};
  bool no_rotation = false;
  CLI::App app(kDescription, "verbatim-perf qp-order");
  app.add_option("--plugin", options.plugin, "the net plugin, a path for dlopen")->required()->type_name("PATH");
  app.add_option("--api", options.api_version, "table version; 0 takes the newest that the plugin has")
      ->check(CLI::Range(0, netapi::kNewestVersion));
  app.add_option("--ranks", options.ranks, "ranks, each on the next device")
      ->check(CLI::Range(2, kMaxRanks))
      ->capture_default_str();
  app.add_option("--flows", options.flows, "connections from each rank to each other rank")
      ->check(CLI::Range(1, kMaxFlows))
      ->capture_default_str();
  app.add_option("--qps", options.qps, "QPs of a connection")->check(CLI::Range(1, kMaxQps))->capture_default_str();
  cli::add_size_option(app, "--bytes", options.bytes, "bytes of the message on each connection, default 128K")
      ->check(CLI::PositiveNumber);
  app.add_option("--rounds", options.rounds, "rounds of the test of the premise")
      ->check(CLI::Range(1, kMaxRounds))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "seed of the random order of doorbells")->capture_default_str();
  app.add_flag("--no-rotation", no_rotation, "every rank requests its peers from rank 0 on (NCCL does not)");
  app.add_option("--orders", options.orders, "the orders to measure")
      ->delimiter(',')
      ->check(CLI::IsMember({"native", "staggered"}))
      ->capture_default_str()
      ->type_name("ORDER,...");
  app.add_option("--json", options.json, "write everything to this file")->type_name("FILE");
  app.add_flag("--plugin-log", options.plugin_log, "print the log lines of the plugin");
  app.add_option("--part", options.part)->group("");
  app.add_option("--result", options.result)->group("");
  const auto leave = cli::parse(app, argc, argv);
  if (leave) return *leave;
  options.rotate = !no_rotation;
  return options;
}

}  // namespace verbatim::perf::qp_order
