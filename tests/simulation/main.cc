// simulation --plugin PATH [--seed N] [--seeds COUNT] [--again N] [--addresses N] [--trace]
//
// Runs a job for each of COUNT seeds, the first of which is N. Each prints the hash of its events, their number, and
// the virtual time that it took. --again N: every N-th seed runs twice, the second time with other addresses, and its
// hash must be the same. --addresses N: those of the first time (0); the second time has the next number. --trace: one
// line for each event. The exit status is 1 when a run has failed; stderr says why.
#include <getopt.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>

#include "simulation/job.h"
#include "simulation/run.h"

namespace {

struct Options {
  std::string plugin;
  unsigned long long seed = 1;
  unsigned long long seeds = 1;
  unsigned long long again = 0;
  unsigned long long addresses = 0;
  bool trace = false;
};

bool parse_number(const char* text, unsigned long long& value) {
  const char* const end = text + std::strlen(text);
  const auto [parsed, error] = std::from_chars(text, end, value);
  return parsed == end && error == std::errc();
}

bool parse(int argc, char** argv, Options& options) {
  constexpr option kOptions[] = {{"plugin", required_argument, nullptr, 'p'},
                                 {"seed", required_argument, nullptr, 's'},
                                 {"seeds", required_argument, nullptr, 'n'},
                                 {"again", required_argument, nullptr, 'a'},
                                 {"addresses", required_argument, nullptr, 'd'},
                                 {"trace", no_argument, nullptr, 't'},
                                 {nullptr, 0, nullptr, 0}};
  for (int found = 0; (found = ::getopt_long(argc, argv, "", kOptions, nullptr)) != -1;) {
    if (found == 'p') options.plugin = optarg;
    if (found == 's' && !parse_number(optarg, options.seed)) return false;
    if (found == 'n' && !parse_number(optarg, options.seeds)) return false;
    if (found == 'a' && !parse_number(optarg, options.again)) return false;
    if (found == 'd' && !parse_number(optarg, options.addresses)) return false;
    if (found == 't') options.trace = true;
    if (found == '?') return false;
  }
  return optind == argc && !options.plugin.empty();
}

simulation::Result run_seed(const Options& options, unsigned long long seed, unsigned long long addresses) {
  simulation::Job job = simulation::draw_job(seed, options.plugin, addresses);
  job.prints_log = options.trace;
  const simulation::Plan plan{
      .seed = seed, .addresses = addresses, .trace = options.trace, .limit = simulation::kJobLimit};
  return simulation::run(plan, job.processes, [&](std::size_t process) { return simulation::run_job(job, process); });
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) {
    std::fprintf(stderr, "usage: %s --plugin PATH [--seed N] [--seeds COUNT] [--again N] [--addresses N] [--trace]\n",
                 argv[0]);
    return 2;
  }
  unsigned long long failed = 0;
  std::set<std::uint64_t> hashes;
  const auto begin = std::chrono::steady_clock::now();
  for (unsigned long long seed = options.seed; seed != options.seed + options.seeds; ++seed) {
    const simulation::Result result = run_seed(options, seed, options.addresses);
    const simulation::Outcome& outcome = result.outcome;
    hashes.insert(outcome.hash);
    bool passed = result.passed;
    if (passed && options.again != 0 && seed % options.again == 0) {
      const simulation::Result second = run_seed(options, seed, options.addresses + 1);
      passed = second.passed && second.outcome.hash == outcome.hash;
      if (!passed) {
        std::fprintf(stderr, "seed %llu with --addresses %llu: %s, hash %016lx\n", seed, options.addresses + 1,
                     second.passed ? "passed" : "FAILED", second.outcome.hash);
      }
    }
    if (!passed) ++failed;
    std::printf("seed %llu: %s, hash %016lx, %lu events, %lu switches, %.3f ms\n", seed, passed ? "passed" : "FAILED",
                outcome.hash, outcome.events, outcome.switches, static_cast<double>(outcome.ended) / 1e6);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("%llu seeds, %llu failed, %zu different hashes, %.1f seeds a second\n", options.seeds, failed,
              hashes.size(), static_cast<double>(options.seeds) / seconds.count());
  if (hashes.size() != options.seeds) std::fprintf(stderr, "two seeds had the same run\n");
  return failed == 0 && hashes.size() == options.seeds ? 0 : 1;
}
