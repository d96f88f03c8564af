#include "verbatim-perf/qp_order/options.h"

#include <CLI/CLI.hpp>
#include <sstream>

#include "netapi/plugin.h"
#include "ranks/options.h"

namespace verbatim::perf::qp_order {
namespace {

constexpr const char* kDescription =
    "What the order of the queue pairs buys on the device at hand. First the premise: does the device serve its send\n"
    "queues by QP number at all? Then an all-to-all between ranks in this process, with each VERBATIM_QP_ORDER: "
    "whether\n"
    "the QPs lie where they should, when each peer gets its first byte, how evenly peers are served until the first "
    "one\n"
    "has all, and how many send to one receiver at the same time. With softverbs' virtual clock (SOFTVERBS_LINK_GBPS)\n"
    "everything is posted while the clock is held and read from its trace: figures repeat to the byte. On any other\n"
    "device times are those of completions, as one thread sees them.";

constexpr int kMostRanks = 64;
constexpr int kMostFlows = 64;
constexpr int kMostQps = 128;
constexpr int kMostRounds = 1000;

}  // namespace

std::variant<QpOrderOptions, ranks::EarlyExit> parse_qp_order_options(int argc, const char* const* argv) {
  QpOrderOptions options;
  options.orders = {"native", "staggered"};
  std::string bytes = "128K";
  bool no_rotation = false;
  CLI::App app(kDescription, "verbatim-perf qp-order");
  app.add_option("--plugin", options.plugin, "the net plugin, a path for dlopen")->required()->type_name("PATH");
  app.add_option("--api", options.api_version, "table version; 0 takes the newest that the plugin has")
      ->check(CLI::Range(0, netapi::kNewestVersion));
  app.add_option("--ranks", options.ranks, "ranks, each on the next device")
      ->check(CLI::Range(2, kMostRanks))
      ->capture_default_str();
  app.add_option("--flows", options.flows, "connections from each rank to each other one")
      ->check(CLI::Range(1, kMostFlows))
      ->capture_default_str();
  app.add_option("--qps", options.qps, "QPs of a connection")->check(CLI::Range(1, kMostQps))->capture_default_str();
  app.add_option("--bytes", bytes, "bytes of the message on each connection")->capture_default_str()->type_name("SIZE");
  app.add_option("--rounds", options.rounds, "of the test of the premise")
      ->check(CLI::Range(1, kMostRounds))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "of what is left to chance")->capture_default_str();
  app.add_flag("--no-rotation", no_rotation, "every rank asks for its peers from rank 0 on, which NCCL does not");
  app.add_option("--orders", options.orders, "which of them")
      ->delimiter(',')
      ->check(CLI::IsMember({"native", "staggered"}))
      ->capture_default_str()
      ->type_name("ORDER,...");
  app.add_option("--json", options.json, "write everything to this file")->type_name("FILE");
  app.add_flag("--verbose", options.verbose, "print the plugin's log lines");
  app.add_option("--part", options.part)->group("");
  app.add_option("--result", options.result)->group("");
  std::ostringstream out;
  std::ostringstream err;
  try {
    app.parse(argc, argv);
    options.bytes = ranks::parse_bytes(bytes);
    if (options.bytes == 0)
      throw ranks::Failure("--bytes: a message without bytes shows no order", ranks::ExitStatus::kUsage);
  } catch (const CLI::ParseError& leave) {
    const bool asked_for = app.exit(leave, out, err) == 0;
    return ranks::EarlyExit{asked_for ? ranks::ExitStatus::kOk : ranks::ExitStatus::kUsage,
                            asked_for ? out.str() : err.str()};
  } catch (const ranks::Failure& refused) {
    return ranks::EarlyExit{refused.status, std::string(refused.what()) + "\n"};
  }
  options.rotate = !no_rotation;
  return options;
}

}  // namespace verbatim::perf::qp_order
