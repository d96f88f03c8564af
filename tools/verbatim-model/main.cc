// verbatim-model: the effect of QP orders between many PEs, if NICs serve their send queues by QP number.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli/command_line.h"
#include "cli/table.h"
#include "verbatim-model/model.h"

namespace {

using namespace verbatim::model;

constexpr const char* kDescription =
    "Models a dense all-to-all: each PE serves its QPs round robin by number, one quantum a slot; each receiving port\n"
    "receives one quantum a slot; all PEs start together. Prints how many PEs send to one PE at the same time, how "
    "deep\n"
    "the queues get, and when a peer has its first quantum, for four orders of the QPs: all QPs of a peer in a row, "
    "or\n"
    "the first QPs of all peers before the second ones; starting with PE 0, or with the PE after the own one. That "
    "NICs\n"
    "serve by QP number is a premise, not a result: verbatim-perf qp-order tests it.";
constexpr unsigned kMaxQps = 128;
constexpr unsigned kJsonSchema = 1;  // of each row
constexpr unsigned kMaxQuanta = 4096;

struct Options {
  std::vector<unsigned> pes{4, 8, 16, 32};
  std::vector<unsigned> qps{1, 4};
  unsigned quanta = 8;
  bool as_json = false;
};

nlohmann::ordered_json json_of(const Shape& job, const Order& order, const Figures& figures) {
  return {{"schema", kJsonSchema},
          {"pes", job.pes},
          {"qps", job.qps},
          {"quanta", job.quanta},
          {"order", order.name},
          {"efficiency", figures.efficiency},
          {"deepest", figures.deepest},
          {"senders", figures.senders},
          {"first_mean", figures.first_mean},
          {"first_max", figures.first_max},
          {"jain", figures.jain},
          {"inversions", figures.inversions}};
}

verbatim::cli::ExitStatus run(const Options& options) {
  const verbatim::cli::Table table({{"PEs", 7},
                                    {"QPs", 4},
                                    {" order", -23},
                                    {"efficiency", 10, 3},
                                    {"deepest", 8},
                                    {"senders", 8},
                                    {"first mean", 11, 2},
                                    {"first max", 10},
                                    {"jain", 7, 3},
                                    {"inversions", 12}});
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  if (!options.as_json) {
    std::printf("# times in slots of one quantum; %u quanta on each QP\n", options.quanta);
    table.print_titles(stdout);
  }
  for (const unsigned pes : options.pes) {
    for (const unsigned qps : options.qps) {
      for (const Order& order : kOrders) {
        const Shape job{pes, qps, options.quanta};
        const Figures figures = simulate(job, order);
        if (options.as_json) {
          rows.push_back(json_of(job, order, figures));
          continue;
        }
        table.print_row(stdout,
                        {pes, qps, std::string(" ") + order.name, figures.efficiency, figures.deepest, figures.senders,
                         figures.first_mean, figures.first_max, figures.jain, figures.inversions});
      }
    }
  }
  if (options.as_json) std::printf("%s\n", rows.dump(1).c_str());
  return verbatim::cli::ExitStatus::kOk;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app(kDescription, "verbatim-model");
  app.add_option("--pes", options.pes, "processing elements")
      ->delimiter(',')
      ->check(CLI::Range(2U, kMaxPes))
      ->capture_default_str()
      ->type_name("N,...");
  app.add_option("--qps", options.qps, "QPs to each other PE")
      ->delimiter(',')
      ->check(CLI::Range(1U, kMaxQps))
      ->capture_default_str()
      ->type_name("N,...");
  app.add_option("--quanta", options.quanta, "quanta on each QP")
      ->check(CLI::Range(1U, kMaxQuanta))
      ->capture_default_str();
  app.add_flag("--json", options.as_json, "print one JSON array instead of a table");
  if (const auto early = verbatim::cli::parse(app, argc, argv)) return verbatim::cli::leave(*early);
  return verbatim::cli::run_or_report([&] { return run(options); });
}
