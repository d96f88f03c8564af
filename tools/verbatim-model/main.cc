// verbatim-model: the effect of QP orders between many PEs, if NICs serve their send queues by QP number.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/version.h"
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
constexpr unsigned kMaxQuanta = 4096;

}  // namespace

int main(int argc, char** argv) {
  std::vector<unsigned> pes{4, 8, 16, 32};
  std::vector<unsigned> qps{1, 4};
  unsigned quanta = 8;
  bool as_json = false;
  CLI::App app(kDescription, "verbatim-model");
  app.add_option("--pes", pes, "processing elements")
      ->delimiter(',')
      ->check(CLI::Range(2U, kMaxPes))
      ->capture_default_str()
      ->type_name("N,...");
  app.add_option("--qps", qps, "QPs to each other PE")
      ->delimiter(',')
      ->check(CLI::Range(1U, kMaxQps))
      ->capture_default_str()
      ->type_name("N,...");
  app.add_option("--quanta", quanta, "quanta on each QP")->check(CLI::Range(1U, kMaxQuanta))->capture_default_str();
  app.add_flag("--json", as_json, "print one JSON array instead of a table");
  app.set_version_flag("--version", verbatim::version_text("verbatim-model"), "print the version and exit");
  CLI11_PARSE(app, argc, argv);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  if (!as_json) {
    std::printf("# times in slots of one quantum; %u quanta on each QP\n", quanta);
    std::printf("# %5s %4s  %-22s %10s %8s %8s %11s %10s %7s %12s\n", "PEs", "QPs", "order", "efficiency", "deepest",
                "senders", "first mean", "first max", "jain", "inversions");
  }
  for (const unsigned n : pes) {
    for (const unsigned q : qps) {
      for (const Order& order : kOrders) {
        const Figures figures = simulate({n, q, quanta}, order);
        if (as_json) {
          rows.push_back({{"pes", n},
                          {"qps", q},
                          {"quanta", quanta},
                          {"order", order.name},
                          {"efficiency", figures.efficiency},
                          {"deepest", figures.deepest},
                          {"senders", figures.senders},
                          {"first_mean", figures.first_mean},
                          {"first_max", figures.first_max},
                          {"jain", figures.jain},
                          {"inversions", figures.inversions}});
          continue;
        }
        std::printf("  %5u %4u  %-22s %10.3f %8zu %8u %11.2f %10llu %7.3f %12llu\n", n, q, order.name,
                    figures.efficiency, figures.deepest, figures.senders, figures.first_mean,
                    static_cast<unsigned long long>(figures.first_max), figures.jain,
                    static_cast<unsigned long long>(figures.inversions));
        std::fflush(stdout);
      }
    }
  }
  if (as_json) std::printf("%s\n", rows.dump(1).c_str());
  return 0;
}
