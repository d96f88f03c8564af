#include "verbatim-kv/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <stdexcept>

#include "memory/options.h"
#include "netapi/plugin.h"
#include "netapi/rma.h"
#include "ranks/json.h"
#include "verbatim-kv/layout.h"
#include "verbatim-kv/nixl_faults.h"

namespace verbatim::kv {
namespace {

const std::map<std::string, Allocations> kAllocations{
    {"slab", Allocations::kSlab}, {"family", Allocations::kFamily}, {"layer", Allocations::kLayer}};

const std::map<std::string, Mode> kModes{{"direct", Mode::kDirect},
                                         {"nccl", Mode::kNccl},
                                         {"nixl", Mode::kNixl},
                                         {"put", Mode::kPut},
                                         {"nccl-put", Mode::kNcclPut}};

constexpr const char* kDescription =
    "Moves KV caches from prefill to decode ranks over an NCCL net plugin, in host or GPU memory, as a disaggregated\n"
    "server does:\n"
    "paged blocks, each sent directly into its destination block, many requests in flight, and the indexer's key "
    "cache\n"
    "as a second family (LF) that shares no connection and no state with the first. Every request is validated at "
    "both\n"
    "ends before anything is posted, and every byte is checked.";

Failure usage_error(const std::string& what) {
  return Failure(what, ExitStatus::kUsage);
}

constexpr std::size_t kMaxBlocks = 100'000'000;

struct OptionTexts {
  std::string mode = "direct";
  std::string idle = "none";
  std::string lf = "auto";
  bool lf_first = false;
  std::string allocations = "slab";
  std::vector<std::string> faults = {};
};

void check_put(const Options& options) {
  if (options.memory == memory::Kind::kCuda) throw usage_error("--mode put needs --memory host. Next: see --mode nccl");
  if (options.idle) throw usage_error("--idle needs --mode direct");
  if (!options.compares_modes()) return;
  if (options.mode != Mode::kDirect && options.mode != Mode::kPut) {
    throw usage_error("--compare modes runs direct and put, or with --mode nccl also nccl-put. Next: leave out --mode");
  }
  if (options.plugin.empty()) throw usage_error("--compare modes needs --plugin");
  if (options.api_version != 0) throw usage_error("--compare modes: --api is of one table. Next: leave it out");
}

void check_mode(const Options& options, const std::vector<std::string>& faults) {
  const bool has_root = !options.job.root.empty();
  if (is_over_nccl(options.mode) && options.memory == memory::Kind::kCuda) {
    throw usage_error("--memory is for --mode direct: NCCL always uses GPU memory");
  }
  if (is_over_nccl(options.mode) && options.allocations != Allocations::kSlab) {
    throw usage_error("over NCCL --allocations must be slab");
  }
  if (options.mode == Mode::kPut || (options.compares_modes() && !is_over_nccl(options.mode))) check_put(options);
  const bool with_nixl = options.mode == Mode::kNixl || options.compares_with_nixl();
  if (!with_nixl) return;
  if (has_root) throw usage_error("NIXL's ranks are started by this program: leave out --root and the launcher");
  if (options.memory == memory::Kind::kCuda) throw usage_error("--memory cuda is not possible with NIXL: see --mode");
  if (options.idle) throw usage_error("--idle needs --mode direct");
  if (is_over_nccl(options.mode)) throw usage_error("--compare nixl needs --mode direct");
  if (options.compares_with_nixl() && !faults.empty()) {
    throw usage_error("--compare nixl sets --inject itself, in a run after the timed ones");
  }
  if (options.compare == nixl::kName && options.plugin.empty()) {
    throw usage_error("--compare nixl needs --plugin, the plugin to compare NIXL with");
  }
}

void check_isolation(const Options& options, const std::vector<std::string>& faults) {
  if (options.mode != Mode::kDirect)
    throw usage_error("--isolation needs --mode direct: over NCCL or NIXL the families do not run independently");
  if (!options.compare.empty()) throw usage_error("--isolation and --compare exclude each other");
  if (!faults.empty() || options.idle) throw usage_error("--isolation sets --inject and --idle itself");
}

// Sets the number of warm-up requests. When variants are compared, the default covers each request in flight and each
// connection.
void choose_warmup(Options& options, std::size_t requests, bool given) {
  for (const auto& [name, value] :
       {std::pair("--tokens", options.requests.median_tokens), std::pair("--sigma", options.requests.sigma),
        std::pair("--hit", options.requests.hit), std::pair("--fragmentation", options.fragmentation)}) {
    if (!std::isfinite(value)) throw usage_error(std::string(name) + " is not a number");
  }
  const bool rma = options.mode == Mode::kPut;
  const int oldest = rma ? netapi::kOldestRmaVersion : netapi::kOldestVersion;
  const int newest = rma ? netapi::kNewestRmaVersion : netapi::kNewestVersion;
  if (options.api_version != 0 && (options.api_version < oldest || options.api_version > newest)) {
    throw usage_error("--api must be 0 (the newest) or " + std::to_string(oldest) + " to " + std::to_string(newest));
  }
  if (!options.json.empty() && !options.job.child && options.job.rank == 0) ranks::check_writable(options.json);
  const bool compares_variants = options.isolation || !options.compare.empty();
  if (!given && compares_variants) {
    const auto prefills = static_cast<std::size_t>(options.prefills);
    const std::size_t wanted = std::max(options.concurrency, prefills) * static_cast<std::size_t>(options.engines());
    options.warmup = std::min(wanted, requests / 2);
  }
  if (options.warmup >= requests) {
    throw usage_error("--warmup " + std::to_string(options.warmup) + " leaves no request of " +
                      std::to_string(requests) + " to be timed");
  }
}

// Throws std::invalid_argument when there are too few requests for the run with invalid lists.
void check_bad_lists(const Options& options, const std::vector<Request>& requests) {
  std::vector<Fault> faults;
  for (const std::string& text : bad_list_faults(options.geometries.back().name)) {
    for (const Fault& fault : parse_fault(text)) faults.push_back(fault);
  }
  assign_requests(faults, requests, options.geometries.front().block_tokens, options.geometries.back().block_tokens);
}

struct Given {
  bool procs;
  bool warmup;
};

// Checks the options against each other and sets those that follow from others.
void finish(Options& options, const Given& given, const OptionTexts& texts) {
  options.mode = kModes.at(texts.mode);
  const bool compares_variants = options.isolation || !options.compare.empty();
  if (compares_variants && !options.job.root.empty())
    throw usage_error(
        "--compare and --isolation start their own ranks and cannot be used with --root or a launcher (mpirun, srun, "
        "torchrun)");
  if ((options.mode == Mode::kDirect || options.mode == Mode::kPut) && options.plugin.empty() &&
      options.compare.empty()) {
    throw usage_error("--plugin is required");
  }
  if (options.isolation) check_isolation(options, texts.faults);
  check_mode(options, texts.faults);
  const std::string& lf = texts.lf;
  if (options.decodes % static_cast<int>(options.tp_ratio) != 0) {
    throw usage_error("--decode must be a multiple of --tp-ratio");
  }
  const int ranks = options.prefills + options.decodes;
  if (ranks > ranks::kMaxRanks) throw usage_error("more than " + std::to_string(ranks::kMaxRanks) + " ranks");
  if (options.job.root.empty()) {
    if (given.procs && options.job.procs != ranks)
      throw usage_error("--procs must be --prefill plus --decode, or not given");
    options.job.procs = ranks;
  } else if (options.job.nranks != ranks) {
    throw usage_error("--nranks, or the number of ranks that a launcher has started, must be --prefill plus --decode");
  }
  try {
    options.geometries.push_back(shared_by(scaled(find_model(options.preset).kv, options.scale), options.tp_ratio));
    const bool has_indexer = options.preset.starts_with("deepseek");
    if (lf == "indexer" || (lf == "auto" && has_indexer)) {
      options.geometries.push_back(shared_by(scaled(indexer_geometry(), options.scale), options.tp_ratio));
    }
    const bool has_lf = options.geometries.size() > 1;
    if (options.idle == FamilyId::kLf && !has_lf) throw usage_error("--idle lf: there is no family lf in this run");
    if (options.idle && options.mode != Mode::kDirect) throw usage_error("--idle needs --mode direct");
    if (options.isolation && !has_lf) throw usage_error("--isolation needs two families: see --lf");
    for (const std::string& text : texts.faults) {
      for (const Fault& fault : parse_fault(text)) {
        if (static_cast<std::size_t>(fault.family) >= options.geometries.size()) {
          throw usage_error("--inject " + text + ": there is no family lf in this run");
        }
        if (options.mode == Mode::kNixl && fault.kind != FaultKind::kInvalidList) {
          throw usage_error("--inject " + text + ": not possible with NIXL, only invalid lists are");
        }
        if (options.mode == Mode::kPut && fault.kind != FaultKind::kInvalidList && fault.kind != FaultKind::kGeometry) {
          throw usage_error("--inject " + text + ": not possible with --mode put, which has no fallback stages");
        }
        if (is_over_nccl(options.mode) && fault.kind != FaultKind::kInvalidList && fault.kind != FaultKind::kGeometry) {
          throw usage_error("--inject " + text + ": not possible over NCCL, whose connections cannot be replaced");
        }
        options.faults.push_back(fault);
      }
    }
    const std::vector<Request> requests = make_requests(options);
    assign_requests(options.faults, requests, options.geometries.front().block_tokens,
                    options.geometries.back().block_tokens);
    if (options.compares_with_nixl()) check_bad_lists(options, requests);
    choose_warmup(options, requests.size(), given.warmup);
    if (texts.lf_first) std::reverse(options.geometries.begin(), options.geometries.end());
    static_cast<void>(lay_out(options, requests, true));  // throws Failure when --blocks is too small
  } catch (const std::invalid_argument& invalid) {
    throw usage_error(invalid.what());
  }
}

}  // namespace

std::variant<Options, cli::EarlyExit> parse_options(int argc, const char* const* argv) {
  Options options;
  options.requests = {.count = 64, .median_tokens = 2048, .sigma = 0.8, .max_tokens = 131'072, .seed = 1};
  CLI::App app(kDescription, "verbatim-kv");
  OptionTexts texts;
  const CLI::Range fraction(0.0, 1.0);

  app.add_option("--mode", texts.mode,
                 "direct: over the plugin's table, one message per block; nccl: through NCCL, on GPUs; nixl: through "
                 "NIXL\nwith its UCX backend, in host memory, by Python processes; put: over the plugin's RMA table, "
                 "in host memory, a\n"
                 "put for each block, the last of a request with the signal that they have arrived; nccl-put: the same "
                 "by\nNCCL's ncclPutSignal, on GPUs")
      ->check(CLI::IsMember(kModes))
      ->take_last()
      ->capture_default_str();
  app.add_option("--plugin", options.plugin, "direct, put: path or name of the plugin, passed to dlopen")
      ->type_name("PATH");
  app.add_option("--nccl", options.nccl, "nccl: NCCL's library, which loads its plugin itself")
      ->type_name("PATH")
      ->capture_default_str();
  app.add_option("--python", options.python.path, "nixl: a Python that has NIXL and numpy")
      ->type_name("PATH")
      ->capture_default_str();
  memory::add_memory_options(app, options.memory, options.cuda);
  memory::add_pages_option(app, options.pages);
  app.add_option("--api", options.api_version, "table version; 0 selects the newest that the plugin exports")
      ->check(CLI::Range(0, netapi::kNewestRmaVersion));
  ranks::add_job_options(app, options.job);
  app.add_option("--preset", options.preset, "the model")->check(CLI::IsMember(model_names()))->capture_default_str();
  app.add_option("--lf", texts.lf, "the second family; auto: the indexer's keys, for the deepseek presets")
      ->check(CLI::IsMember({"auto", "indexer", "none"}))
      ->capture_default_str();
  app.add_flag("--lf-first", texts.lf_first, "place, register and connect the second family before the first");
  app.add_option("--scale", options.scale, "use 1/N of the model's layers; messages keep their size")
      ->check(CLI::Range(1U, 1000U))
      ->capture_default_str();
  app.add_option("--prefill", options.prefills, "number of prefill ranks; they have the lowest rank numbers")
      ->check(CLI::Range(1, ranks::kMaxRanks))
      ->capture_default_str();
  app.add_option("--decode", options.decodes, "number of decode ranks")
      ->check(CLI::Range(1, ranks::kMaxRanks))
      ->capture_default_str();
  app.add_option("--tp-ratio", options.tp_ratio, "number of decode ranks that share one prefill rank's KV heads")
      ->check(CLI::IsMember({1U, 2U, 4U}))
      ->capture_default_str();
  app.add_option("--requests", options.requests.count, "number of requests")
      ->check(CLI::Range(std::size_t{1}, std::size_t{10'000'000}))
      ->capture_default_str();
  app.add_option("--tokens", options.requests.median_tokens, "median length of a prompt")
      ->check(CLI::Range(1.0, 1e7))
      ->capture_default_str();
  app.add_option("--sigma", options.requests.sigma,
                 "standard deviation of the logarithm of the lengths; 0: all lengths equal")
      ->check(CLI::Range(0.0, 4.0))
      ->capture_default_str();
  app.add_option("--max-tokens", options.requests.max_tokens, "maximum length of a prompt; longer ones are cut")
      ->check(CLI::Range(1U, 10'000'000U))
      ->capture_default_str();
  app.add_option("--request-file", options.request_file, "read the requests from this file, one per line: TOKENS [HIT]")
      ->type_name("FILE");
  app.add_option("--hit", options.requests.hit, "fraction of each prompt that the decode side already has")
      ->check(fraction)
      ->capture_default_str();
  app.add_option("--fragmentation", options.fragmentation,
                 "of blocks: 0: runs as long as possible, 1: no two adjacent blocks")
      ->check(fraction)
      ->capture_default_str();
  app.add_option("--concurrency", options.concurrency, "number of requests in flight per decode rank")
      ->check(CLI::Range(std::size_t{1}, std::size_t{4096}))
      ->capture_default_str();
  app.add_option("--blocks", options.blocks,
                 "blocks per family and rank; default: 1.5 times what the requests in flight need")
      ->check(CLI::Range(std::size_t{0}, kMaxBlocks));
  app.add_option("--allocations", texts.allocations,
                 "memory of a rank: one slab, one allocation per family, or one per layer")
      ->check(CLI::IsMember(kAllocations))
      ->capture_default_str();
  app.add_option("--depth", options.depth, "direct: receives posted ahead per connection")
      ->check(CLI::Range(1, 32))
      ->capture_default_str();
  app.add_option("--group", options.group,
                 "direct: maximum number of members of a receive; default: the plugin's maximum, at most 8")
      ->check(CLI::Range(1, netapi::kMaxGroup));
  app.add_option("--seed", options.requests.seed, "seed of lengths and block tables")->capture_default_str();
  app.add_flag("!--no-check", options.check, "do not fill and check contents: for timing");
  app.add_option("--request-timeout-ms", options.request_timeout_ms,
                 "a transfer without progress for this time has failed")
      ->check(CLI::Range(1U, 3'600'000U))
      ->capture_default_str();
  app.add_option("--stage-timeout-ms", options.stage_timeout_ms, "timeout of a new connection, and of a staged copy")
      ->check(CLI::Range(1U, 3'600'000U))
      ->capture_default_str();
  app.add_option(
         "--inject", texts.faults,
         "introduce a fault: KIND[,family=kv|lf][,request=N][,times=N][,delay-ms=N][,at=local|peer]; kinds: kill,\n"
         "lost-notification, delay, geometry, wrong-family, count-mismatch, length-mismatch, base-conflict,\n"
         "unregistered, index-out-of-range, overlapping-destination; may be repeated")
      ->type_name("FAULT");
  app.add_option("--idle", texts.idle, "direct: a family with memory and connections, but without requests")
      ->check(CLI::IsMember({"none", "kv", "lf"}))
      ->capture_default_str();
  auto* const warmup =
      app.add_option("--warmup", options.warmup,
                     "number of first requests that are served and checked before the others, but not timed;\n"
                     "default 0; with --compare and --isolation the number of requests in flight, or half of all");
  app.add_option(
         "--compare", options.compare,
         "run over each entry in turn and print the medians: with --mode nccl networks (Verbatim,IB,Socket), "
         "otherwise paths of plugins, and nixl;\n"
         "with nixl also what each does with invalid lists of the second family; nixl alone: --plugin, then NIXL;\n"
         "modes: --mode direct, then put, over --plugin, or with --mode nccl, then nccl-put")
      ->type_name("LIST|modes|nixl");
  app.add_flag("--isolation", options.isolation,
               "run in rounds LF with an idle KV, both, and both with LF's connection killed; print how the families\n"
               "affect each other");
  app.add_option("--rounds", options.rounds, "with --compare and --isolation: number of rounds")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--json", options.json, "write all results as JSON to this file")->type_name("FILE");
  app.add_flag("--plugin-log", options.plugin_log, "print the log lines of the plugin");

  const auto leave = cli::parse(app, argc, argv, [&] {
    ranks::complete_job(app, options.job);
    options.python.timeout_s = options.job.timeout_s;
    options.allocations = kAllocations.at(texts.allocations);
    options.requests.prefills = static_cast<std::uint32_t>(options.prefills);
    options.requests.engines = static_cast<std::uint32_t>(options.decodes) / options.tp_ratio;
    if (texts.idle != "none") options.idle = texts.idle == "kv" ? FamilyId::kKv : FamilyId::kLf;
    finish(options, {app.count("--procs") > 0, warmup->count() > 0}, texts);
  });
  if (leave) return *leave;
  return options;
}

const char* allocations_name(Allocations allocations) {
  for (const auto& [name, named] : kAllocations) {
    if (named == allocations) return name.c_str();
  }
  return "?";
}

const char* mode_name(Mode mode) {
  for (const auto& [name, named] : kModes) {
    if (named == mode) return name.c_str();
  }
  return "?";
}

bool Options::compares_with_nixl() const {
  return ("," + compare + ",").find("," + std::string(nixl::kName) + ",") != std::string::npos;
}

std::vector<Request> make_requests(const Options& options) {
  if (options.request_file.empty()) return generate_requests(options.requests);
  std::ifstream file(options.request_file);
  if (!file) throw usage_error("cannot read " + options.request_file);
  try {
    auto requests = read_requests(file, options.request_file, options.requests);
    if (requests.empty()) throw usage_error(options.request_file + ": no requests");
    return requests;
  } catch (const std::invalid_argument& invalid) {
    throw usage_error(invalid.what());
  }
}

}  // namespace verbatim::kv
