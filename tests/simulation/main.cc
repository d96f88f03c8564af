// On every change 200 seeds, with the full set 20,000, in parts that run at a time.
//: program simulation export_dynamic link=simulation_parts
//: all args='--plugin {plugin} --again 10'
//: test simulation-seeds priority=8 args='--seed 1 --seeds 100'
//: test simulation-more-seeds priority=8 args='--seed 101 --seeds 100'
//: test simulation-seeds-to-{} full priority=10 timeout=3600 args='--seeds 5000'
//:   5000 args='--seed 1'
//:   10000 args='--seed 5001'
//:   15000 args='--seed 10001'
//:   20000 args='--seed 15001'

// simulation --plugin PATH [--seed N] [--seeds COUNT] [--faults LIST] [--processes N] [--parts LIST] [--operations N]
//            [--order N] [--optional yes|no] [--devices NAME] [--shrink] [--again N] [--addresses N] [--trace]
//
// Runs a job for each of COUNT seeds, the first of which is N. Each prints the hash of its events, their number, the
// virtual time that it took, and its faults, with how often each has happened where this is known. --faults LIST: names
// separated by commas, each with the numbers of its events where not all happen (port/1/3), or none; without it the
// seed chooses. --processes, --parts (numbers of connections, puts), --operations: of the job that the seed draws only
// these. --order: another order of the threads. --optional: whether half of the connections have receives with optional
// completion; without it the seed chooses, and with --faults there are none. --devices: standard, as mlx5, bnxt_re or
// irdma, or ib; without it the seed chooses, and with --faults they are standard. --shrink: a run that fails is made
// shorter; the last line repeats the shortest. --again N: every N-th seed runs twice, the second time with other
// addresses, and its hash must be the same.
// --addresses N: those of the first time (0); the second time has the next number. --trace: one line for each event.
// The exit status is 1 when a run has failed; stderr says why.
#include <getopt.h>

#include <array>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "simulation/choice.h"
#include "simulation/job.h"
#include "simulation/run.h"
#include "simulation/shrink.h"

namespace {

struct Options {
  std::string plugin;
  simulation::Choice choice;  // with the first seed
  bool shrinks = false;
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
  std::vector<option> known = {
      {"plugin", required_argument, nullptr, 'p'}, {"seeds", required_argument, nullptr, 'n'},
      {"again", required_argument, nullptr, 'a'},  {"addresses", required_argument, nullptr, 'd'},
      {"trace", no_argument, nullptr, 't'},        {"shrink", no_argument, nullptr, 's'}};
  for (const char* name : simulation::kChoiceOptions) known.push_back({name, required_argument, nullptr, 'c'});
  known.push_back({});
  int index = 0;
  for (int found = 0; (found = ::getopt_long(argc, argv, "", known.data(), &index)) != -1;) {
    if (found == 'p') options.plugin = optarg;
    if (found == 'n' && !parse_number(optarg, options.seeds)) return false;
    if (found == 'a' && !parse_number(optarg, options.again)) return false;
    if (found == 'd' && !parse_number(optarg, options.addresses)) return false;
    if (found == 'c' && !options.choice.set(known[static_cast<std::size_t>(index)].name, optarg)) return false;
    if (found == 't') options.trace = true;
    if (found == 's') options.shrinks = true;
    if (found == '?') return false;
  }
  return optind == argc && !options.plugin.empty();
}

// Returns the exit status.
int shrink(const char* program, const Options& options) {
  const auto run = [&](const simulation::Choice& choice) { return simulation::try_run(choice, options.plugin); };
  const std::optional<simulation::Shorter> shorter = simulation::shrink(options.choice, run);
  if (!shorter) {
    std::printf("%s: passed\n", simulation::describe(options.choice).c_str());
    return 0;
  }
  std::fputs(shorter->tried.text.c_str(), stderr);
  std::printf("the shortest of %zu runs has %lu events:\n%s --plugin %s %s\n", shorter->runs,
              shorter->tried.result.outcome.events, program, options.plugin.c_str(),
              simulation::describe(shorter->choice).c_str());
  return 1;
}

struct SeedRun {
  simulation::Result result;
  simulation::FaultSet faults;
  simulation::FaultCounts counts;
};

SeedRun run_seed(const Options& options, unsigned long long seed, unsigned long long addresses) {
  simulation::Choice choice = options.choice;
  choice.seed = seed;
  simulation::Job job = simulation::draw_job(choice, options.plugin);
  job.prints_log = options.trace;
  simulation::Plan plan = simulation::plan_of(job, seed);
  plan.addresses = addresses;
  const simulation::Result result =
      simulation::run(plan, job.processes, [&](std::size_t process) { return simulation::run_job(job, process); });
  return {result, job.faults.kinds, simulation::fault_counts()};
}

// So many seeds of which none is chosen by hand must have met each fault.
constexpr unsigned long long kEnoughSeeds = 200;

// Of all seeds.
class Totals {
 public:
  void add(const SeedRun& run) {
    for (const simulation::Fault fault : run.faults) {
      const auto index = static_cast<std::size_t>(fault);
      ++runs_[index];
      happened_[index] += run.counts.happened[index];
    }
    if (run.counts.failed_processes != 0) ++runs_with_failed_calls_;
  }
  void print() const {
    std::printf("faults:");
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      if (runs_[i] == 0) continue;
      std::printf(" %s in %llu runs", simulation::kFaultNames[i], runs_[i]);
      std::printf(happened_[i] != 0 ? " (%llu times)," : ",", happened_[i]);
    }
    std::printf(" failed calls in %llu runs\n", runs_with_failed_calls_);
  }
  // Those that are counted.
  bool have_all_happened() const {
    bool all = true;
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      const bool has = simulation::is_counted(static_cast<simulation::Fault>(i)) ? happened_[i] != 0 : runs_[i] != 0;
      if (!has) std::fprintf(stderr, "no run had the fault %s\n", simulation::kFaultNames[i]);
      all = all && has;
    }
    return all;
  }

 private:
  std::array<unsigned long long, simulation::kFaultNames.size()> runs_{};
  std::array<unsigned long long, simulation::kFaultNames.size()> happened_{};
  unsigned long long runs_with_failed_calls_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) {
    std::fprintf(
        stderr,
        "usage: %s --plugin PATH [--seed N] [--seeds COUNT] [--faults LIST] [--processes N] [--parts LIST] "
        "[--operations N] [--order N] [--optional yes|no] [--devices NAME] [--shrink] [--again N] [--addresses N] "
        "[--trace]\n"
        "faults: none",
        argv[0]);
    for (const char* name : simulation::kFaultNames) std::fprintf(stderr, ", %s", name);
    std::fprintf(stderr, "\n");
    return 2;
  }
  if (options.shrinks) return shrink(argv[0], options);
  unsigned long long failed = 0;
  std::set<std::uint64_t> hashes;
  Totals totals;
  const auto begin = std::chrono::steady_clock::now();
  const unsigned long long first = options.choice.seed;
  for (unsigned long long seed = first; seed != first + options.seeds; ++seed) {
    const SeedRun run = run_seed(options, seed, options.addresses);
    const simulation::Outcome& outcome = run.result.outcome;
    hashes.insert(outcome.hash);
    bool passed = run.result.passed;
    totals.add(run);
    if (passed && options.again != 0 && seed % options.again == 0) {
      const simulation::Result second = run_seed(options, seed, options.addresses + 1).result;
      passed = second.passed && second.outcome.hash == outcome.hash;
      if (!passed) {
        std::fprintf(stderr, "seed %llu with --addresses %llu: %s, hash %016lx\n", seed, options.addresses + 1,
                     second.passed ? "passed" : "FAILED", second.outcome.hash);
      }
    }
    if (!passed) ++failed;
    std::printf("seed %llu: %s, hash %016lx, %lu events, %lu switches, %.3f ms, faults:%s\n", seed,
                passed ? "passed" : "FAILED", outcome.hash, outcome.events, outcome.switches,
                static_cast<double>(outcome.ended) / 1e6, run.counts.describe(run.faults).c_str());
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("%llu seeds, %llu failed, %zu different hashes, %.1f seeds a second\n", options.seeds, failed,
              hashes.size(), static_cast<double>(options.seeds) / seconds.count());
  totals.print();
  if (hashes.size() != options.seeds) std::fprintf(stderr, "two seeds had the same run\n");
  const bool is_complete = options.seeds < kEnoughSeeds || options.choice.faults || totals.have_all_happened();
  return failed == 0 && hashes.size() == options.seeds && is_complete ? 0 : 1;
}
