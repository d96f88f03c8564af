#include "verbatim-eplb/options.h"

#include <CLI/CLI.hpp>
#include <map>

#include "memory/options.h"
#include "netapi/plugin.h"
#include "netapi/rma.h"
#include "ranks/json.h"
#include "workload/eplb/placement.h"

namespace verbatim::eplb {
namespace {

using ranks::ExitStatus;
using ranks::Failure;

const std::map<std::string, Mode> kModes{
    {"per-tensor", Mode::kPerTensor}, {"packed", Mode::kPacked}, {"direct", Mode::kDirect}, {"put", Mode::kPut}};
// Modes that include the batched schedule.
const std::map<std::string, Mode> kBatchedModes{{"batched", Mode::kPacked}, {"batched-per-tensor", Mode::kPerTensor}};
const std::map<std::string, PeersAtATime> kSchedules{{"all", PeersAtATime::kAll}, {"batched", PeersAtATime::kOne}};

const std::map<std::string, Inject> kInjections{
    {"none", Inject::kNothing},
    {"flip-byte", Inject::kFlipByte},
    {"dtype-order", Inject::kDtypeOrder},
    {"wrong-slot", Inject::kWrongSlot},
    {"swap-receives", Inject::kSwapReceives},
    {"drop-duplicate", Inject::kDropDuplicate},
    {"write-guard", Inject::kWriteGuard},
    {"swap-order", Inject::kSwapOrder},
};

const std::map<std::string, Over> kOver{{"plugin", Over::kPlugin}, {"nccl", Over::kNccl}, {"nixl", Over::kNixl}};

constexpr const char* kDescription =
    "Moves experts between ranks as vLLM's expert-parallel load balancer does, layer by layer, and checks every "
    "byte.\n\n"
    "Modes:\n"
    "  per-tensor          a send and a receive for each tensor, all sends first, experts ascending\n"
    "  packed              each expert packed once into a buffer of one layer's size, one send to each rank that needs "
    "it\n"
    "  direct              one grouped receive for each expert, with its tensors as members, into the new rows;\n"
    "                      only with --over plugin\n"
    "  put                 a put for each tensor from where it lies into the new rows, the last of an expert with a "
    "signal:\n"
    "                      over the plugin's RMA table in host memory, or over NCCL's ncclPutSignal\n"
    "  batched, batched-per-tensor  the same as packed and per-tensor with --schedule batched\n\n"
    "Schedules:\n"
    "  all                 each rank exchanges experts with all its peers at the same time\n"
    "  batched             in batches in which each rank has at most one peer\n\n"
    "Policies: identity, shuffle, rotate, hot, greedy-drift, scale-up, scale-down, trace=FILE. A trace has one line "
    "of\n"
    "JSON for each layer: {\"layer\": 0, \"old\": [expert of each row, rank after rank; -1: empty], \"new\": [...]}\n\n"
    "Presets: dsv3-fp8, dsv3-bf16, dsv3-nvfp4 (DeepSeek-V3: 256 experts and 32 redundant rows, 58 layers), "
    "tiny-mixed.";

template <typename Map>
std::string keys_of(const Map& map) {
  std::string keys;
  for (const auto& [key, value] : map) keys += (keys.empty() ? "" : ", ") + key;
  return keys;
}

void check_nixl(const Options& options) {
  const auto usage_error = [](const std::string& why) { return Failure(why, ExitStatus::kUsage); };
  const bool compares = options.compare == nixl::kName;
  if (compares && options.over != Over::kPlugin) throw usage_error("--compare nixl needs --over plugin");
  if (!compares && options.over != Over::kNixl) return;
  if (!compares && !options.compare.empty()) throw usage_error("--compare needs --over plugin or nccl");
  if (!compares && options.mode != Mode::kDirect) {
    throw usage_error("--over nixl needs --mode direct: each rank reads rows from where they are");
  }
  if (options.peers != PeersAtATime::kAll) throw usage_error("NIXL reads from all peers: it needs --schedule all");
  if (options.memory == memory::Kind::kCuda) throw usage_error("--memory cuda is not possible with NIXL");
  if (!options.job.root.empty()) {
    throw usage_error("NIXL's ranks are started by this program: leave out --root and the launcher");
  }
  if (options.inject != Inject::kNothing && (compares || options.inject != Inject::kFlipByte)) {
    throw usage_error("with NIXL the only possible --inject is flip-byte, with --over nixl");
  }
}

void check_consistency(const Options& options) {
  const auto usage_error = [](const std::string& why) { return Failure(why, ExitStatus::kUsage); };
  if (!options.json.empty() && !options.job.child && options.job.rank == 0) ranks::check_writable(options.json);
  const bool rma = options.mode == Mode::kPut;
  const int oldest = rma ? netapi::kOldestRmaVersion : netapi::kOldestVersion;
  const int newest = rma ? netapi::kNewestRmaVersion : netapi::kNewestVersion;
  if (options.api_version != 0 && (options.api_version < oldest || options.api_version > newest)) {
    throw usage_error("--api must be 0 (the newest) or " + std::to_string(oldest) + " to " + std::to_string(newest));
  }
  if (!options.compare.empty() && !options.job.root.empty() && !options.job.child) {
    throw usage_error(
        "--compare starts its own ranks and cannot be used with --root or a launcher (mpirun, srun, torchrun)");
  }
  if (options.plan_only) return;
  if (options.over == Over::kNccl && options.mode == Mode::kDirect) {
    throw usage_error("--mode direct needs --over plugin: NCCL's interface has no grouped receive");
  }
  if (options.over == Over::kNccl && options.memory == memory::Kind::kCuda) {
    throw usage_error("--memory is for --over plugin: NCCL always uses GPU memory");
  }
  const bool puts = options.mode == Mode::kPut || options.compare == kCompareModes;
  if (puts && options.over == Over::kPlugin && options.memory == memory::Kind::kCuda) {
    throw usage_error("--mode put over the plugin needs --memory host. Next: for GPU memory use --over nccl");
  }
  if (options.compare == kCompareModes && options.api_version != 0) {
    throw usage_error("--compare modes: --api is of one table. Next: leave it out");
  }
  if (options.over == Over::kPlugin && options.plugin.empty() &&
      (options.compare.empty() || options.compare == kCompareSchedules || options.compare == kCompareModes ||
       options.compare == nixl::kName)) {
    throw usage_error("--over plugin needs --plugin");
  }
  check_nixl(options);
  if (!options.check && options.inject != Inject::kNothing) throw usage_error("--inject needs --check full");
}

}  // namespace

const char* mode_name(Mode mode) {
  for (const auto& [name, named] : kModes) {
    if (named == mode) return name.c_str();
  }
  return "?";
}

const char* inject_name(Inject inject) {
  for (const auto& [name, named] : kInjections) {
    if (named == inject) return name.c_str();
  }
  return "?";
}

const char* schedule_name(PeersAtATime peers) {
  return peers == PeersAtATime::kAll ? "all" : "batched";
}

std::variant<Options, cli::EarlyExit> parse_options(int argc, const char* const* argv) {
  Options options;
  CLI::App app(kDescription, "verbatim-eplb");
  std::string mode = mode_name(options.mode);
  std::string schedule = schedule_name(options.peers);
  std::string over = "plugin";
  std::string check = "full";
  std::string inject = "none";
  app.add_option("--preset", options.preset, "layout and number of experts, and number of layers")
      ->capture_default_str();
  app.add_option("--tensors", options.tensors,
                 "the tensors of an expert, instead of the preset's; with :total the bytes "
                 "of all experts of a rank")
      ->type_name("NAME:TYPE:BYTES[:total],...");
  app.add_option("--logical", options.experts, "number of experts, instead of the preset's")
      ->check(CLI::Range(1, 1'000'000));
  auto* const redundant = app.add_option("--redundant", options.redundant,
                                         "rows in addition to one for each expert; default: the preset's, or more if "
                                         "the ranks and the policy need more")
                              ->check(CLI::Range(0, 1'000'000));
  app.add_option("--layers", options.layers, "number of layers, instead of the preset's")->check(CLI::Range(1, 10'000));
  app.add_option("--scale", options.scale, "divides the size of every tensor")->check(CLI::Range(1, 1 << 30));
  app.add_option("--policy", options.policy,
                 "how experts are placed before and after; with several, or all, the layers of each policy\n"
                 "follow those of the one before")
      ->capture_default_str()
      ->type_name("NAME,...|all|trace=FILE");
  app.add_option("--seed", options.seed, "seed of placements and contents")->capture_default_str();
  app.add_option("--mode", mode, keys_of(kModes) + ", " + keys_of(kBatchedModes))
      ->check(CLI::IsMember(kModes) | CLI::IsMember(kBatchedModes))
      ->capture_default_str();
  auto* const given_schedule = app.add_option("--schedule", schedule, keys_of(kSchedules))
                                   ->check(CLI::IsMember(kSchedules))
                                   ->capture_default_str();
  app.add_option("--over", over,
                 "plugin: a net plugin's table without NCCL; nccl: NCCL, in GPU memory;\n"
                 "nixl: NIXL with its UCX backend, in host memory, by Python processes")
      ->check(CLI::IsMember(kOver))
      ->capture_default_str();
  app.add_option("--plugin", options.plugin, "over plugin: path or name of the plugin, passed to dlopen")
      ->type_name("PATH");
  app.add_option("--api", options.api_version,
                 "over plugin: table version; 0 selects the newest that the plugin exports")
      ->check(CLI::Range(0, netapi::kNewestRmaVersion));
  app.add_option("--nccl", options.nccl, "over nccl: NCCL's library, passed to dlopen")->capture_default_str();
  app.add_option("--python", options.python.path, "over nixl: a Python that has NIXL and numpy")
      ->type_name("PATH")
      ->capture_default_str();
  memory::add_memory_options(app, options.memory, options.cuda);
  memory::add_pages_option(app, options.pages);
  app.add_option(
         "--ops-per-group", options.ops_per_group,
         "maximum number of sends and receives of a rank in one group, the same at both ends; 0: one group per layer")
      ->check(CLI::Range(0, 1'000'000'000))
      ->capture_default_str();
  cli::add_size_option(app, "--chunk", options.chunk_bytes,
                       "over plugin, except direct and put: size of the largest message, default 128K as in NCCL; 0: "
                       "the plugin's maximum");
  app.add_option("--depth", options.depth, "over plugin, except put: receives posted ahead per connection")
      ->check(CLI::Range(1, 32))
      ->capture_default_str();
  app.add_option("--iters", options.iterations, "how often all layers are rearranged")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  auto* const warmup =
      app.add_option("--warmup", options.warmup,
                     "iterations before the timed ones, checked but not timed; default 0, with --compare 1")
          ->check(CLI::Range(0, 1'000'000));
  app.add_option("--check", check, "full: check every byte after every layer; off: no checks, for timing")
      ->check(CLI::IsMember({"full", "off"}))
      ->capture_default_str();
  app.add_option("--inject", inject, "introduce this error, which the run must detect: " + keys_of(kInjections))
      ->check(CLI::IsMember(kInjections));
  app.add_option("--delay", options.delay_ms, "maximum of a random delay in ms of each rank before each group")
      ->check(CLI::Range(0, 10'000));
  app.add_option("--watchdog", options.watchdog_s,
                 "seconds without progress after which the pending operations are printed "
                 "and the run ends")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  app.add_flag("--plan-only", options.plan_only, "print the plan of each layer as a line of JSON, and move nothing");
  app.add_option("--compare", options.compare,
                 "run over each entry in turn and print the medians: with --over nccl networks (Verbatim,IB,Socket), "
                 "with --over plugin paths of plugins; schedules: with each schedule;\n"
                 "modes: with packed, direct (over nccl per-tensor) and put; nixl: packed and direct over\n"
                 "--plugin, then READs of NIXL from where the rows are")
      ->type_name("LIST|schedules|modes|nixl");
  app.add_option("--rounds", options.rounds, "with --compare: number of rounds")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--json", options.json, "write all results as JSON to this file")->type_name("FILE");
  app.add_flag("--plugin-log", options.plugin_log, "print the log lines of the plugin");
  ranks::add_job_options(app, options.job);

  const auto leave = cli::parse(app, argc, argv, [&] {
    if (const auto batched = kBatchedModes.find(mode); batched != kBatchedModes.end()) {
      options.mode = batched->second;
      if (given_schedule->count() == 0) schedule = "batched";
      if (schedule != "batched" || options.compare == kCompareSchedules) {
        throw Failure("--mode " + mode + " is always scheduled in batches. Next: use --mode " + mode_name(options.mode),
                      ExitStatus::kUsage);
      }
    } else {
      options.mode = kModes.at(mode);
    }
    options.peers = kSchedules.at(schedule);
    options.over = kOver.at(over);
    options.inject = kInjections.at(inject);
    options.check = check == "full";
    options.has_redundant = redundant->count() > 0;
    if (warmup->count() == 0 && !options.compare.empty()) options.warmup = 1;
    ranks::complete_job(app, options.job);
    options.python.timeout_s = options.job.timeout_s;
    check_consistency(options);
  });
  if (leave) return *leave;
  return options;
}

}  // namespace verbatim::eplb
