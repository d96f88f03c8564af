#include "verbatim-perf/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>

#include "memory/options.h"
#include "netapi/plugin.h"
#include "netapi/rma.h"
#include "ranks/launcher_variables.h"
#include "verbatim-perf/nccl_tests_options.h"

namespace verbatim::perf {
namespace {

const std::map<std::string, OperationKind> kOperations{
    {"all_reduce", OperationKind::kAllReduce},
    {"all_gather", OperationKind::kAllGather},
    {"reduce_scatter", OperationKind::kReduceScatter},
    {"broadcast", OperationKind::kBroadcast},
    {"reduce", OperationKind::kReduce},
    {"alltoall", OperationKind::kAllToAll},
    {"alltoallv", OperationKind::kAllToAllV},
    {"gather", OperationKind::kGather},
    {"scatter", OperationKind::kScatter},
    {"hypercube", OperationKind::kHypercube},
    {"sendrecv", OperationKind::kSendRecv},
    {"stream", OperationKind::kStream},
    {"pingpong", OperationKind::kPingPong},
    {"grouped", OperationKind::kGrouped},
    {"put", OperationKind::kPut},
    {"put_signal", OperationKind::kPutSignal},
    {"get", OperationKind::kGet},
    {"alltoall_put", OperationKind::kAllToAllPut},
};

const std::map<std::string, Format> kFormats{{"verbatim", Format::kVerbatim}, {"nccl-tests", Format::kNcclTests}};

static_assert(ranks::kMaxRanks <= 256, "more ranks need smaller contributions to sums: kTypes in workload/content.cc");

constexpr const char* kDescription =
    "nccl-tests for NCCL net plugins, without NCCL: verbatim-perf calls a plugin as NCCL's core does, in host memory\n"
    "or GPU memory (see --memory). It verifies all bytes of the checked iterations (see --check). Of reductions a sum\n"
    "of integers (-d uint32) shows each wrong bit; floats round some away, and max, min and avg drop some.\n\n"
    "Operations of nccl-tests. Started by a link with the name of its program (all_reduce_perf), it runs this one,\n"
    "prints nccl-tests' table, has no timeout, and takes the plugin from NCCL_NET_PLUGIN (default verbatim):\n"
    "  all_reduce      reduces over all ranks (--op), in a ring: reduce_scatter, then all_gather; only --memory host\n"
    "  all_gather      ring\n"
    "  reduce_scatter  ring; only --memory host\n"
    "  broadcast       from the root along the ring\n"
    "  reduce          along the ring to the root; only --memory host\n"
    "  alltoall        every rank to every other\n"
    "  alltoallv       the same, but to rank r+d it sends d shares\n"
    "  gather          every rank to the root\n"
    "  scatter         from the root to every rank\n"
    "  hypercube       all_gather with the ranks whose number differs in one bit; ranks are a power of 2\n"
    "  sendrecv        to the next rank, from the previous one\n\n"
    "Operations between two ranks:\n"
    "  stream          rank 0 to rank 1, one way\n"
    "  pingpong        between ranks 0 and 1; the times are half a round trip: mean, minimum, median, p99, p99.9\n"
    "  grouped         rank 0 to rank 1, several messages with permuted tags into one grouped receive\n\n"
    "Operations over the plugin's RMA table (v13, v14), in host memory; --contexts divides their bytes:\n"
    "  put             into the memory of the next rank\n"
    "  put_signal      the same, each put with a signal; a rank checks its bytes as soon as it sees the signals\n"
    "  get             from the memory of the next rank\n"
    "  alltoall_put    into the memory of every rank, with signals that end each iteration\n\n"
    "Subcommands (must be the first argument):\n"
    "  cost        instructions, verbs calls and memory of a message; see verbatim-perf cost --help\n"
    "  qp-order    effect of the order of the queue pairs; see verbatim-perf qp-order --help";

// -t and -g of nccl-tests give the ranks of one process. Here each rank is a process, so they can only replace --procs.
void take_ranks(const CLI::App& app, const Options& options, ranks::Job& job) {
  const int ranks = options.threads * options.gpus;
  if (job.child) return;
  if (app.count("--procs") > 0) throw Failure("-t and -g replace --procs: give only one of them", ExitStatus::kUsage);
  if (ranks > ranks::kMaxRanks) {
    throw Failure("-t times -g is above " + std::to_string(ranks::kMaxRanks), ExitStatus::kUsage);
  }
  if (ranks == 1 && (!job.root.empty() || ranks::launched_rank(::getenv))) return;  // one rank a process
  if (!job.root.empty() || ranks::launched_rank(::getenv)) {
    throw Failure("-t and -g: each rank is a process. Next: let the launcher start more processes", ExitStatus::kUsage);
  }
  job.procs = ranks;
}

// Options that mean nothing for an operation are refused, so that nobody believes that they had an effect.
void check_meaning(const CLI::App& app, const Options& options) {
  const std::string operation = operation_name(options.operation);
  const auto refuse = [&](const char* option, const char* why) {
    if (app.count(option) == 0) return;
    throw Failure(std::string(option) + " has no meaning for " + operation + ": " + why + ". Next: leave it out",
                  ExitStatus::kUsage);
  };
  if (!is_put_operation(options.operation)) {
    refuse("--contexts", "it does not use the RMA table. --channels are its connections");
    return;
  }
  refuse("--channels", "RMA has contexts, see --contexts");
  refuse("--chunk", "each context carries its bytes in one put");
  refuse("--group", "puts have no receives");
  refuse("--merge", "RMA has physical devices only");
  refuse("--cuda", "it runs in host memory only");
  refuse("-u", "its buffers begin at a page boundary");
  refuse("-N", "its sizes run once");
  if (options.operation == OperationKind::kAllToAllPut) {
    refuse("--depth", "each iteration waits for the signals of all ranks");
  }
  if (options.memory == memory::Kind::kCuda) {
    throw Failure(operation +
                      " needs --memory host. Next: for GPU memory use an operation over the net table, for "
                      "example alltoall, or nccl-tests' alltoall_perf -R 2 -D 4",
                  ExitStatus::kUsage);
  }
  if (options.format == Format::kNcclTests) {
    throw Failure(operation + " has no run in place, which nccl-tests' table has. Next: leave --format out",
                  ExitStatus::kUsage);
  }
}

void check_api(const Options& options) {
  const bool rma = is_put_operation(options.operation);
  const int oldest = rma ? netapi::kOldestRmaVersion : netapi::kOldestVersion;
  const int newest = rma ? netapi::kNewestRmaVersion : netapi::kNewestVersion;
  if (options.api_version == 0 || (options.api_version >= oldest && options.api_version <= newest)) return;
  throw Failure("--api " + std::to_string(options.api_version) + ": the " + (rma ? "RMA" : "net") +
                    " tables have versions " + std::to_string(oldest) + " to " + std::to_string(newest) +
                    ". Next: give one of them, or leave --api out",
                ExitStatus::kUsage);
}

void check_consistency(const Options& options) {
  check_api(options);
  if (options.min_bytes > options.max_bytes) throw Failure("--minbytes is above --maxbytes", ExitStatus::kUsage);
  const bool pair = options.operation == OperationKind::kStream || options.operation == OperationKind::kPingPong ||
                    options.operation == OperationKind::kGrouped;
  if (pair && options.job.size() != 2) {
    throw Failure(std::string(operation_name(options.operation)) + " needs exactly 2 ranks", ExitStatus::kUsage);
  }
  if (options.operation == OperationKind::kHypercube &&
      !std::has_single_bit(static_cast<unsigned>(options.job.size()))) {
    throw Failure("hypercube needs a number of ranks that is a power of 2", ExitStatus::kUsage);
  }
  if (options.memory == memory::Kind::kCuda && reduces(options.operation)) {
    throw Failure(
        std::string(operation_name(options.operation)) +
            " reduces on the CPU and needs --memory host. Next: for GPU memory use an operation that only moves "
            "bytes, for example all_gather, or NCCL's own",
        ExitStatus::kUsage);
  }
  if (pair && options.format == Format::kNcclTests) {
    throw Failure(
        std::string(operation_name(options.operation)) + " has no counterpart in nccl-tests. Next: leave --format out",
        ExitStatus::kUsage);
  }
  if (options.plugin.empty() == options.compare.empty()) {
    throw Failure("one of --plugin and --compare is needed", ExitStatus::kUsage);
  }
  if (!options.compare.empty() && !options.job.root.empty()) {
    throw Failure(
        "--compare starts its own ranks and cannot be used with --root or a launcher (mpirun, srun, torchrun)",
        ExitStatus::kUsage);
  }
}

}  // namespace

const char* operation_name(OperationKind kind) {
  for (const auto& [name, named] : kOperations) {
    if (named == kind) return name.c_str();
  }
  return "?";
}

bool is_put_operation(OperationKind kind) {
  return kind == OperationKind::kPut || kind == OperationKind::kPutSignal || kind == OperationKind::kGet ||
         kind == OperationKind::kAllToAllPut;
}

bool reduces(OperationKind kind) {
  return kind == OperationKind::kAllReduce || kind == OperationKind::kReduceScatter || kind == OperationKind::kReduce;
}

bool has_root(OperationKind kind) {
  return kind == OperationKind::kBroadcast || kind == OperationKind::kReduce || kind == OperationKind::kGather ||
         kind == OperationKind::kScatter;
}

bool shows_reduction(OperationKind kind) {
  return reduces(kind) || kind == OperationKind::kSendRecv;
}

std::vector<std::size_t> message_sizes(const Options& options) {
  std::vector<std::size_t> sizes;
  std::size_t bytes = options.min_bytes;
  while (bytes <= options.max_bytes) {
    sizes.push_back(bytes);
    const auto scaled = static_cast<std::size_t>(static_cast<double>(bytes) * options.factor);
    bytes = std::max(bytes + 1, options.factor > 1 ? scaled : bytes + options.step_bytes);
  }
  return sizes;
}

std::variant<Options, EarlyExit> parse_options(int argc, const char* const* argv) {
  Options options;
  CLI::App app(kDescription, "verbatim-perf");
  const auto size_option = [&app](const std::string& names, std::size_t& into, const std::string& help) {
    cli::add_size_option(app, names, into, help);
  };

  std::string operation = operation_of_program(argc > 0 ? argv[0] : "");
  const bool is_link = kOperations.contains(operation);
  if (!is_link) {
    app.add_option("operation", operation, "one of the operations above")
        ->required()
        ->type_name("OP")
        ->check(CLI::IsMember(kOperations));
  }
  app.add_option("--plugin", options.plugin,
                 "the net plugin, found as NCCL finds NCCL_NET_PLUGIN: a path, or NAME for libnccl-net-NAME.so")
      ->type_name("PATH");
  app.add_option("--api", options.api_version, "table version; 0 selects the newest that the plugin exports")
      ->check(CLI::Range(0, netapi::kNewestRmaVersion));
  app.add_option("--merge", options.merge,
                 "merge the plugin's first N devices into one (makeVDevice) and use only this one; 1: use only the "
                 "first device. Default: all devices, channel by channel")
      ->check(CLI::Range(1, 8));
  memory::add_memory_options(app, options.memory, options.cuda);
  if (is_link) options.job.timeout_s = 0;  // as in nccl-tests
  ranks::add_job_options(app, options.job);
  app.add_option("--channels", options.channels, "connections for each pair of peers and direction")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  size_option(
      "--chunk", options.chunk_bytes,
      "bytes of the largest single message; a larger transfer is cut into several messages; default: 512K for the "
      "rings, 128K for other operations of nccl-tests, unlimited for the others");
  app.add_option("--contexts", options.contexts, "put, put_signal, get, alltoall_put: RMA contexts")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--depth", options.depth,
                 "receives posted ahead on a connection; put, put_signal, get: how many are under way in a context")
      ->check(CLI::Range(1, 32))
      ->capture_default_str();
  app.add_option("--group", options.group,
                 "grouped: members of a grouped receive; default: the plugin's maximum, at most 8")
      ->check(CLI::Range(1, netapi::kMaxGroup));
  size_option("-b,--minbytes", options.min_bytes,
              "smallest number of bytes of an operation (column size), default 32M");
  size_option("-e,--maxbytes", options.max_bytes, "largest number of bytes of an operation, default 32M");
  app.add_option("-f,--stepfactor", options.factor, "factor from one size to the next; 1: -i counts")
      ->check(CLI::Range(1.0, 1e6))
      ->capture_default_str();
  size_option("-i,--stepbytes", options.step_bytes, "difference from one size to the next, default 1M");
  app.add_option("-n,--iters", options.iterations, "timed iterations of each size")
      ->check(CLI::Range(1, 1'000'000'000))
      ->capture_default_str();
  app.add_option("-w,--warmup_iters", options.warmup_iterations, "iterations before the timed ones, not timed")
      ->check(CLI::Range(0, 1'000'000'000))
      ->capture_default_str();
  app.add_option("-c,--check", options.check_iterations,
                 "checked iterations of each size, in addition to the last timed one; 0: no checks")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  int average = static_cast<int>(options.average);
  app.add_option("-a,--average", average,
                 "the time that is reported, of rank 0 (0), or of all ranks the mean (1), minimum (2) or maximum (3)")
      ->check(CLI::Range(0, 3))
      ->capture_default_str();
  CLI::Option* const threads_option =
      app.add_option("-t,--nthreads", options.threads,
                     "with -g, instead of --procs: N * M ranks on this machine, each a process")
          ->check(CLI::Range(1, ranks::kMaxRanks))
          ->type_name("N");
  CLI::Option* const gpus_option = app.add_option("-g,--ngpus", options.gpus, "with -t, instead of --procs: see there")
                                       ->check(CLI::Range(1, ranks::kMaxRanks))
                                       ->type_name("M");
  std::string format = is_link ? "nccl-tests" : "verbatim";
  app.add_option("--format", format, "of the table: Verbatim's, or the lines of nccl-tests, with a second run in place")
      ->check(CLI::IsMember(kFormats))
      ->capture_default_str();
  NcclTestsOptions given;
  add_nccl_tests_options(app, options, given);
  app.add_option("--compare", options.compare,
                 "run over each plugin of the list in turn, round by round, and print the medians of the rounds, with "
                 "the ratio to the first plugin")
      ->delimiter(',')
      ->type_name("PATH,...");
  app.add_option("--rounds", options.rounds, "with --compare: number of rounds")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--json", options.json, "write all results as JSON to this file")->type_name("FILE");
  app.add_option("--pause", options.pause_us,
                 "microseconds that a rank sleeps after a poll without progress; 0: it only yields")
      ->check(CLI::Range(0, 10'000))
      ->capture_default_str();
  app.add_flag("--plugin-log", options.plugin_log, "print the log lines of the plugin");

  const std::vector<std::string> arguments = arguments_of(argc, argv);
  std::vector<const char*> raw{"verbatim-perf"};
  options.arguments.assign(argv, argv + argc);
  for (const std::string& argument : arguments) raw.push_back(argument.c_str());
  const auto leave = cli::parse(app, static_cast<int>(raw.size()), raw.data(), [&] {
    const bool has_ranks = threads_option->count() + gpus_option->count() > 0;
    if (has_ranks) take_ranks(app, options, options.job);
    ranks::complete_job(app, options.job);
    if (!has_ranks && (options.job.child || options.job.root.empty())) options.gpus = options.job.size();
    if (is_link && options.plugin.empty() && options.compare.empty()) {
      const char* const configured = std::getenv("NCCL_NET_PLUGIN");
      options.plugin = configured != nullptr && *configured != '\0' ? configured : "verbatim";
    }
    options.average = static_cast<Average>(average);
    options.format = kFormats.at(format);
    options.operation = kOperations.at(operation);
    check_meaning(app, options);
    check_consistency(options);
    take_nccl_tests_options(app, given, options);
  });
  if (leave) return *leave;
  return options;
}

}  // namespace verbatim::perf
