#include "verbatim-perf/cost/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "netapi/plugin.h"

namespace verbatim::perf::cost {
namespace {

constexpr const char* kDescription =
    "Measures the CPU cost of one message: calls both ends of a connection in one process over softverbs' inline\n"
    "engine, one group at a time with eight receives posted ahead, and counts instructions by object (callgrind), "
    "verbs\n"
    "calls, work requests and completions, then the memory and the set-up of many connections. The same for puts, if\n"
    "the plugin has an RMA table: one put at a time, one with a signal, and bursts of eight puts to one peer. All\n"
    "plugins get the same settings: the QPs of a connection through VERBATIM_ and NCCL_IB_QPS_PER_CONNECTION. Run it\n"
    "under tools/softverbs, or through tools/cost.";

constexpr int kMostMessages = 1'000'000;
constexpr int kMostConnections = 4000;
constexpr int kMostQps = 128;

}  // namespace

std::variant<CostOptions, cli::EarlyExit> parse_cost_options(int argc, const char* const* argv) {
  CostOptions options;
  options.groups = {1, 4, 8};
  options.qps = {1, 2, 4};
  options.sizes = {0, 8, 4 << 10, 128 << 10, 1 << 20};
  std::vector<std::string> what{"messages", "puts"};
  bool no_instructions = false;
  CLI::App app(kDescription, "verbatim-perf cost");
  app.add_option("--plugin", options.plugins, "path or name of a net plugin, passed to dlopen; may be repeated")
      ->required()
      ->type_name("PATH");
  app.add_option("--api", options.api_version, "table version; 0 selects the newest that the plugin exports")
      ->check(CLI::Range(0, netapi::kNewestVersion));
  cli::add_sizes_option(app, "--sizes", options.sizes, "message sizes in bytes, default 0,8,4K,128K,1M")
      ->type_name("SIZE,...");
  app.add_option("--groups", options.groups, "numbers of members of a grouped receive")
      ->delimiter(',')
      ->check(CLI::Range(1, netapi::kMaxGroup))
      ->capture_default_str()
      ->type_name("N,...");
  app.add_option("--qps", options.qps, "numbers of QPs per connection")
      ->delimiter(',')
      ->check(CLI::Range(1, kMostQps))
      ->capture_default_str()
      ->type_name("N,...");
  cli::add_size_option(app, "--room", options.room, "bytes that each receive has more than its message, default 0");
  app.add_option("--merge", options.merge,
                 "merge the plugin's first N devices into one (makeVDevice), so that connections have N ports, and "
                 "puts N lanes; "
                 "needs as many in SOFTVERBS_DEVICES")
      ->check(CLI::Range(1, 8))
      ->capture_default_str();
  app.add_option("--messages", options.messages, "groups measured in each cell, after the same number for warm-up")
      ->check(CLI::Range(1, kMostMessages))
      ->capture_default_str();
  app.add_option("--connections", options.connections, "connections for memory and set-up time; 0: not measured")
      ->check(CLI::Range(0, kMostConnections))
      ->capture_default_str();
  app.add_option("--what", what, "what is measured: messages (net table), puts (RMA table)")
      ->delimiter(',')
      ->check(CLI::IsMember({"messages", "puts"}))
      ->capture_default_str()
      ->type_name("WHAT,...");
  app.add_flag("--no-instructions", no_instructions, "do not run valgrind: only verbs calls, memory and set-up");
  app.add_flag("--optional", options.optional,
               "receives of one member with optional completion, as in NCCL's LL protocols");
  app.add_option("--json", options.json, "write all results as JSON to this file")->type_name("FILE");
  app.add_flag("--plugin-log", options.plugin_log, "print the log lines of the plugins");
  app.add_option("--part", options.part)->group("");
  app.add_option("--result", options.result)->group("");
  const auto leave = cli::parse(app, argc, argv, [&] {
    const auto measures = [&](const char* name) { return std::find(what.begin(), what.end(), name) != what.end(); };
    options.messages_of_net = measures("messages");
    options.puts = measures("puts");
    for (const char* const of_messages : {"--api", "--groups", "--qps", "--connections", "--optional", "--room"}) {
      if (options.messages_of_net || app.count(of_messages) == 0) continue;
      throw ranks::Failure(std::string(of_messages) +
                               " has no meaning for puts. Next: leave it out, or measure messages too (--what "
                               "messages,puts)",
                           ranks::ExitStatus::kUsage);
    }
    if (options.optional && options.api_version != 0 && options.api_version < netapi::kOldestWithOptionalReceives) {
      throw ranks::Failure("--optional needs table version 9 or newer", ranks::ExitStatus::kUsage);
    }
  });
  if (leave) return *leave;
  options.instructions = !no_instructions;
  return options;
}

}  // namespace verbatim::perf::cost
