#include "verbatim-perf/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <sstream>

#include "netapi/plugin.h"

namespace verbatim::perf {
namespace {

using traffic::ElementType;

const std::map<std::string, OperationKind> kOperations{
    {"all_reduce", OperationKind::kAllReduce}, {"all_gather", OperationKind::kAllGather},
    {"alltoall", OperationKind::kAllToAll},    {"sendrecv", OperationKind::kSendRecv},
    {"stream", OperationKind::kStream},        {"pingpong", OperationKind::kPingPong},
    {"grouped", OperationKind::kGrouped},
};

constexpr ElementType kTypes[] = {ElementType::kInt8,  ElementType::kUint8,  ElementType::kInt32, ElementType::kUint32,
                                  ElementType::kInt64, ElementType::kUint64, ElementType::kFloat};

constexpr std::size_t kMaxMessageBytes = std::size_t{1} << 40;
constexpr int kMaxRanks = 256;  // beyond it, sums of floats would no longer be exact

constexpr const char* kDescription =
    "nccl-tests for NCCL net plugins, without GPUs: drives a plugin as NCCL's core does and checks every byte.\n\n"
    "Operations:\n"
    "  all_reduce  ring: reduce-scatter, then all-gather, sums\n"
    "  all_gather  ring\n"
    "  alltoall    every rank to every other\n"
    "  sendrecv    to the next rank, from the previous one\n"
    "  stream      rank 0 to rank 1, one way\n"
    "  pingpong    between ranks 0 and 1; the time is half a round trip\n"
    "  grouped     rank 0 to rank 1, several messages with permuted tags into one grouped receive\n"
    "  cost        instructions, verbs calls and memory of a message; has a --help of its own\n\n"
    "Exit status: 0 all correct, 1 wrong data, 2 wrong usage, 3 a plugin, rank or system failure, 4 time is up.";

template <typename Map>
std::string keys_of(const Map& map) {
  std::string keys;
  for (const auto& [key, value] : map) keys += (keys.empty() ? "" : ", ") + key;
  return keys;
}

std::map<std::string, ElementType> types_by_name() {
  std::map<std::string, ElementType> types;
  for (const ElementType type : kTypes) types[traffic::element_name(type)] = type;
  return types;
}

void check_consistency(const Options& options, bool has_procs, bool has_rank, bool has_nranks) {
  if (options.min_bytes > options.max_bytes) throw Failure("--minbytes is above --maxbytes", ExitStatus::kUsage);
  if (options.root.empty()) {
    if (has_rank || has_nranks) throw Failure("--rank and --nranks need --root", ExitStatus::kUsage);
  } else if (has_procs && !options.child) {
    throw Failure("--procs starts ranks on this host, --root is for ranks that were started elsewhere: not both",
                  ExitStatus::kUsage);
  } else if (!has_rank || !has_nranks) {
    throw Failure("--root needs --rank and --nranks", ExitStatus::kUsage);
  } else if (options.rank >= options.nranks) {
    throw Failure("--rank must be below --nranks", ExitStatus::kUsage);
  }
  const int ranks = options.root.empty() ? options.procs : options.nranks;
  const bool pair = options.operation == OperationKind::kStream || options.operation == OperationKind::kPingPong ||
                    options.operation == OperationKind::kGrouped;
  if (pair && ranks != 2) {
    throw Failure(std::string(operation_name(options.operation)) + " runs between 2 ranks", ExitStatus::kUsage);
  }
}

}  // namespace

const char* operation_name(OperationKind kind) {
  for (const auto& [name, named] : kOperations) {
    if (named == kind) return name.c_str();
  }
  return "?";
}

std::size_t parse_bytes(const std::string& text) {
  const auto refuse = [&text] {
    return Failure("not a size: '" + text + "' (examples: 8, 64K, 1.5M, 2G)", ExitStatus::kUsage);
  };
  if (text.empty() || (std::isdigit(static_cast<unsigned char>(text[0])) == 0 && text[0] != '.')) throw refuse();
  double number = 0;
  std::size_t end = 0;
  try {
    number = std::stod(text, &end);
  } catch (const std::exception&) {
    throw refuse();
  }
  static const std::map<std::string, double> kUnits{
      {"", 1}, {"K", 1024}, {"M", 1024.0 * 1024}, {"G", 1024.0 * 1024 * 1024}};
  std::string unit = text.substr(end);
  std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return std::toupper(c); });
  if (unit.size() > 1 && unit.ends_with("IB")) unit.resize(unit.size() - 2);
  if (unit.ends_with("B")) unit.resize(unit.size() - 1);
  const auto known = kUnits.find(unit);
  if (known == kUnits.end()) throw refuse();
  const double bytes = number * known->second;
  if (!(bytes <= static_cast<double>(kMaxMessageBytes)) || std::floor(bytes) != bytes) throw refuse();
  return static_cast<std::size_t>(bytes);
}

std::vector<std::size_t> message_sizes(const Options& options) {
  std::vector<std::size_t> sizes;
  std::size_t bytes = options.min_bytes;
  while (bytes <= options.max_bytes) {
    sizes.push_back(bytes);
    const auto scaled = static_cast<std::size_t>(static_cast<double>(bytes) * options.factor);
    bytes = std::max(bytes + 1, options.step_bytes > 0 ? bytes + options.step_bytes : scaled);
  }
  return sizes;
}

std::variant<Options, Leave> parse_options(int argc, const char* const* argv) {
  Options options;
  CLI::App app(kDescription, "verbatim-perf");
  const std::map<std::string, ElementType> types = types_by_name();
  const auto size_option = [&app](const std::string& names, std::size_t& into, const std::string& help) {
    app.add_option_function<std::string>(
           names,
           [&into](const std::string& text) {
             try {
               into = parse_bytes(text);
             } catch (const Failure& refused) {
               throw CLI::ValidationError(refused.what());
             }
           },
           help)
        ->type_name("SIZE");
  };

  std::string operation;
  std::string type = traffic::element_name(options.type);
  app.add_option("operation", operation, "one of the operations above")
      ->required()
      ->type_name("OP")
      ->check(CLI::IsMember(kOperations));
  app.add_option("--plugin", options.plugin, "the net plugin, a path or name for dlopen")
      ->required()
      ->type_name("PATH");
  app.add_option("--api", options.api_version, "table version; 0 takes the newest that the plugin has")
      ->check(CLI::Range(0, netapi::kNewestVersion));
  auto* const procs = app.add_option("--procs", options.procs, "ranks to start on this host")
                          ->check(CLI::Range(1, kMaxRanks))
                          ->capture_default_str();
  app.add_option("--root", options.root, "between hosts: where rank 0 listens and the others find it")
      ->type_name("HOST:PORT");
  auto* const rank =
      app.add_option("--rank", options.rank, "with --root: this rank")->check(CLI::Range(0, kMaxRanks - 1));
  auto* const nranks =
      app.add_option("--nranks", options.nranks, "with --root: number of ranks")->check(CLI::Range(1, kMaxRanks));
  app.add_option("--channels", options.channels, "connections per pair of peers and direction")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  size_option("--chunk", options.chunk_bytes,
              "largest message; default: 512K for the rings, 128K for alltoall and sendrecv, unlimited for the others");
  app.add_option("--depth", options.depth, "receives posted ahead on a connection")
      ->check(CLI::Range(1, 32))
      ->capture_default_str();
  app.add_option("--group", options.group, "grouped: members of a receive; default: what the plugin allows, at most 8")
      ->check(CLI::Range(1, netapi::kMaxGroup));
  size_option("-b,--minbytes", options.min_bytes, "smallest size, default 8");
  size_option("-e,--maxbytes", options.max_bytes, "largest size, default 8M");
  app.add_option("-f,--stepfactor", options.factor, "each size is this times the one before")
      ->check(CLI::Range(1.0, 1e6))
      ->capture_default_str();
  size_option("-i,--stepbytes", options.step_bytes, "each size is this more than the one before, in place of -f");
  app.add_option("-n,--iters", options.iterations, "timed iterations of each size")
      ->check(CLI::Range(1, 1'000'000'000))
      ->capture_default_str();
  app.add_option("-w,--warmup_iters", options.warmup_iterations, "iterations before the timed ones")
      ->check(CLI::Range(0, 1'000'000'000))
      ->capture_default_str();
  app.add_option("-c,--check", options.check_iterations,
                 "checked iterations of each size, besides the last timed one; 0 checks nothing")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  app.add_option("-d,--datatype", type, keys_of(types))
      ->check(CLI::IsMember(types))
      ->capture_default_str()
      ->type_name("TYPE");
  app.add_option("--json", options.json, "write everything to this file")->type_name("FILE");
  app.add_option("--timeout", options.timeout_s, "seconds after which all ranks are stopped")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--pause", options.pause_us, "microseconds that a rank sleeps when nothing has moved; 0 only yields")
      ->check(CLI::Range(0, 10'000))
      ->capture_default_str();
  app.add_flag("--verbose", options.verbose, "print the plugin's log lines");
  app.add_option("--token", options.token, "with --root: a number that all ranks of the job share");
  app.add_flag("--child", options.child)->group("");

  std::ostringstream out;
  std::ostringstream err;
  try {
    app.parse(argc, argv);
    options.operation = kOperations.at(operation);
    options.type = types.at(type);
    check_consistency(options, procs->count() > 0, rank->count() > 0, nranks->count() > 0);
  } catch (const CLI::ParseError& leave) {
    const bool asked_for = app.exit(leave, out, err) == 0;
    return Leave{asked_for ? ExitStatus::kOk : ExitStatus::kUsage, asked_for ? out.str() : err.str()};
  } catch (const Failure& refused) {
    return Leave{refused.status, std::string(refused.what()) + "\n"};
  }
  return options;
}

}  // namespace verbatim::perf
