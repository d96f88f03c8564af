#include "verbatim-kv/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <stdexcept>

#include "netapi/plugin.h"
#include "ranks/json.h"
#include "verbatim-kv/layout.h"

namespace verbatim::kv {
namespace {

const std::map<std::string, Allocations> kAllocations{
    {"slab", Allocations::kSlab}, {"family", Allocations::kFamily}, {"layer", Allocations::kLayer}};

constexpr const char* kDescription =
    "Moves KV caches from prefill to decode ranks over an NCCL net plugin, without GPUs, as a disaggregated server "
    "does:\n"
    "paged blocks, each sent from where it lies to where it belongs, many requests in flight, and the indexer's key "
    "cache\n"
    "as a second family (LF) that shares no connection and no state with the first. Every request is validated at "
    "both\n"
    "ends before anything is posted, and every byte is checked.\n\n"
    "Exit status: 0 all served and correct, 1 wrong data, 2 wrong usage, 3 a plugin, rank or system failure, 4 time "
    "is\n"
    "up, 5 requests were refused as invalid, 6 blocks were left to be computed again.";

Failure usage(const std::string& what) {
  return Failure(what, ExitStatus::kUsage);
}

constexpr std::size_t kMaxBlocks = 100'000'000;

struct Texts {
  std::string mode = "direct";
  std::string idle = "none";
  std::string lf = "auto";
  bool lf_first = false;
  std::string allocations = "slab";
  std::vector<std::string> faults = {};
};

void check_isolation(const Options& options, const std::vector<std::string>& faults) {
  if (options.mode == Mode::kNccl)
    throw usage("--isolation is for --mode direct: over NCCL the families take steps together");
  if (!options.compare.empty()) throw usage("--isolation and --compare: not both");
  if (!faults.empty() || options.idle) throw usage("--isolation chooses --inject and --idle itself");
}

// Which requests are only to warm up: where runs are compared, one for each place in flight and each connection.
void choose_warmup(Options& options, std::size_t requests, bool given) {
  for (const auto& [name, value] :
       {std::pair("--tokens", options.requests.median_tokens), std::pair("--sigma", options.requests.sigma),
        std::pair("--hit", options.requests.hit), std::pair("--fragmentation", options.fragmentation)}) {
    if (!std::isfinite(value)) throw usage(std::string(name) + ": not a number");
  }
  if (options.api_version != 0 && options.api_version < netapi::kOldestVersion) {
    throw usage("--api: there are 0 (the newest) and " + std::to_string(netapi::kOldestVersion) + " to " +
                std::to_string(netapi::kNewestVersion));
  }
  if (!options.json.empty() && !options.job.child) ranks::check_writable(options.json);
  const bool compares_variants = options.isolation || !options.compare.empty();
  if (!given && compares_variants) {
    const auto prefills = static_cast<std::size_t>(options.prefills);
    const std::size_t wanted = std::max(options.concurrency, prefills) * static_cast<std::size_t>(options.engines());
    options.warmup = std::min(wanted, requests / 2);
  }
  if (options.warmup >= requests) {
    throw usage("--warmup " + std::to_string(options.warmup) + " leaves none of " + std::to_string(requests) +
                " requests to be timed");
  }
}

struct Given {
  bool procs;
  bool warmup;
};

// What follows from the options together.
void finish(Options& options, const Given& given, const Texts& texts) {
  options.mode = texts.mode == "nccl" ? Mode::kNccl : Mode::kDirect;
  const bool compares_variants = options.isolation || !options.compare.empty();
  if (compares_variants && !options.job.root.empty())
    throw usage("--compare and --isolation start their own ranks: no --root");
  if (options.mode == Mode::kDirect && options.plugin.empty() && options.compare.empty()) {
    throw usage("--plugin is required");
  }
  if (options.isolation) check_isolation(options, texts.faults);
  if (options.mode == Mode::kNccl && options.allocations != Allocations::kSlab) {
    throw usage("--mode nccl: the cache is one slab");
  }
  const std::string& lf = texts.lf;
  if (options.decodes % static_cast<int>(options.tp_ratio) != 0) {
    throw usage("--decode must be a multiple of --tp-ratio");
  }
  const int ranks = options.prefills + options.decodes;
  if (ranks > ranks::kMaxRanks) throw usage("more than " + std::to_string(ranks::kMaxRanks) + " ranks");
  if (options.job.root.empty()) {
    if (given.procs && options.job.procs != ranks) throw usage("--procs is --prefill plus --decode, or left out");
    options.job.procs = ranks;
  } else if (options.job.nranks != ranks) {
    throw usage("--nranks is not --prefill plus --decode");
  }
  try {
    options.geometries.push_back(shared_by(scaled(find_model(options.preset).kv, options.scale), options.tp_ratio));
    const bool has_indexer = options.preset.starts_with("deepseek");
    if (lf == "indexer" || (lf == "auto" && has_indexer)) {
      options.geometries.push_back(shared_by(scaled(indexer_geometry(), options.scale), options.tp_ratio));
    }
    const bool has_lf = options.geometries.size() > 1;
    if (options.idle == FamilyId::kLf && !has_lf) throw usage("--idle lf: there is no family lf in this run");
    if (options.idle && options.mode == Mode::kNccl) throw usage("--idle is for --mode direct");
    if (options.isolation && !has_lf) throw usage("--isolation needs two families: see --lf");
    for (const std::string& text : texts.faults) {
      for (const Fault& fault : parse_fault(text)) {
        if (static_cast<std::size_t>(fault.family) >= options.geometries.size()) {
          throw usage("--inject " + text + ": there is no family lf in this run");
        }
        if (options.mode == Mode::kNccl && fault.kind != FaultKind::kInvalidList &&
            fault.kind != FaultKind::kGeometry) {
          throw usage("--inject " + text + ": NCCL has no connection that could be replaced");
        }
        options.faults.push_back(fault);
      }
    }
    const std::vector<Request> requests = make_requests(options);
    assign_requests(options.faults, requests, options.geometries.front().block_tokens,
                    options.geometries.back().block_tokens);
    choose_warmup(options, requests.size(), given.warmup);
    if (texts.lf_first) std::reverse(options.geometries.begin(), options.geometries.end());
    static_cast<void>(lay_out(options, requests, true));  // says what finds no room
  } catch (const std::invalid_argument& refused) {
    throw usage(refused.what());
  }
}

}  // namespace

std::variant<Options, ranks::EarlyExit> parse_options(int argc, const char* const* argv) {
  Options options;
  options.requests = {.count = 64, .median_tokens = 2048, .sigma = 0.8, .max_tokens = 131'072, .seed = 1};
  CLI::App app(kDescription, "verbatim-kv");
  Texts texts;
  const CLI::Range fraction(0.0, 1.0);

  app.add_option("--mode", texts.mode, "direct: over the plugin's table, block by block; nccl: through NCCL, on GPUs")
      ->check(CLI::IsMember({"direct", "nccl"}))
      ->capture_default_str();
  app.add_option("--plugin", options.plugin, "direct: the net plugin, a path or name for dlopen")->type_name("PATH");
  app.add_option("--nccl", options.nccl, "nccl: NCCL's library, which finds its plugin by itself")
      ->type_name("PATH")
      ->capture_default_str();
  app.add_option("--cuda", options.cuda, "nccl: CUDA's driver library")->type_name("PATH")->capture_default_str();
  app.add_option("--api", options.api_version, "table version; 0 takes the newest that the plugin has")
      ->check(CLI::Range(0, netapi::kNewestVersion));
  ranks::add_job_options(app, options.job);
  app.add_option("--preset", options.preset, "whose caches")
      ->check(CLI::IsMember(model_names()))
      ->capture_default_str();
  app.add_option("--lf", texts.lf, "the second family; auto: the indexer's keys, for the deepseek presets")
      ->check(CLI::IsMember({"auto", "indexer", "none"}))
      ->capture_default_str();
  app.add_flag("--lf-first", texts.lf_first, "lays out, registers and connects the second family before the first");
  app.add_option("--scale", options.scale, "with 1/N of the model's layers; messages keep their size")
      ->check(CLI::Range(1U, 1000U))
      ->capture_default_str();
  app.add_option("--prefill", options.prefills, "prefill ranks: they come first")
      ->check(CLI::Range(1, ranks::kMaxRanks))
      ->capture_default_str();
  app.add_option("--decode", options.decodes, "decode ranks")
      ->check(CLI::Range(1, ranks::kMaxRanks))
      ->capture_default_str();
  app.add_option("--tp-ratio", options.tp_ratio, "decode ranks that share what one prefill rank holds")
      ->check(CLI::IsMember({1U, 2U, 4U}))
      ->capture_default_str();
  app.add_option("--requests", options.requests.count, "how many")
      ->check(CLI::Range(std::size_t{1}, std::size_t{10'000'000}))
      ->capture_default_str();
  app.add_option("--tokens", options.requests.median_tokens, "median length of a prompt")
      ->check(CLI::Range(1.0, 1e7))
      ->capture_default_str();
  app.add_option("--sigma", options.requests.sigma, "of the logarithm of the lengths; 0: all the same")
      ->check(CLI::Range(0.0, 4.0))
      ->capture_default_str();
  app.add_option("--max-tokens", options.requests.max_tokens, "longer prompts are cut")
      ->check(CLI::Range(1U, 10'000'000U))
      ->capture_default_str();
  app.add_option("--request-file", options.request_file, "one request a line in place of these: TOKENS [HIT]")
      ->type_name("FILE");
  app.add_option("--hit", options.requests.hit, "fraction of each prompt that the decode side has already")
      ->check(fraction)
      ->capture_default_str();
  app.add_option("--fragmentation", options.fragmentation, "of blocks: 0 runs as long as can be, 1 no two neighbours")
      ->check(fraction)
      ->capture_default_str();
  app.add_option("--concurrency", options.concurrency, "requests that a decode rank has in flight")
      ->check(CLI::Range(std::size_t{1}, std::size_t{4096}))
      ->capture_default_str();
  app.add_option("--blocks", options.blocks, "of each family and rank; default: what can be in flight, and half again")
      ->check(CLI::Range(std::size_t{0}, kMaxBlocks));
  app.add_option("--allocations", texts.allocations, "memory of a rank: one slab, one piece a family, or one a layer")
      ->check(CLI::IsMember(kAllocations))
      ->capture_default_str();
  app.add_option("--depth", options.depth, "receives posted ahead on a connection")
      ->check(CLI::Range(1, 32))
      ->capture_default_str();
  app.add_option("--group", options.group, "members of a receive at most; default: what the plugin allows")
      ->check(CLI::Range(1, netapi::kMaxGroup));
  app.add_option("--seed", options.requests.seed, "of lengths and block tables")->capture_default_str();
  app.add_flag("!--no-check", options.check, "neither fills nor checks contents: for timing");
  app.add_option("--request-timeout-ms", options.request_timeout_ms,
                 "without progress, a request's transfer has failed")
      ->check(CLI::Range(1U, 3'600'000U))
      ->capture_default_str();
  app.add_option("--rung-timeout-ms", options.stage_timeout_ms, "for a fresh connection, and for a staged copy")
      ->check(CLI::Range(1U, 3'600'000U))
      ->capture_default_str();
  app.add_option("--inject", texts.faults,
                 "a fault: KIND[,family=kv|lf][,request=N][,times=N][,delay-ms=N][,at=local|peer]; kinds: kill,\n"
                 "lost-notification, delay, geometry, wrong-family, count-mismatch, length-mismatch, base-conflict,\n"
                 "unregistered, index-out-of-range, overlapping-destination; may be given again")
      ->type_name("FAULT");
  app.add_option("--idle", texts.idle, "direct: a family that has memory and connections, and no requests")
      ->check(CLI::IsMember({"none", "kv", "lf"}))
      ->capture_default_str();
  auto* const warmup =
      app.add_option("--warmup", options.warmup,
                     "requests, of the first, that are served and checked before the others and not timed;\n"
                     "default 0, with --compare and --isolation one for each that may be in flight, or half");
  app.add_option("--compare", options.compare,
                 "run over each in turn and print the medians: with --mode nccl its networks (Verbatim,IB,Socket), "
                 "else paths of plugins")
      ->type_name("LIST");
  app.add_flag("--isolation", options.isolation,
               "run in turn LF beside an idle KV, both, and both with LF's connection killed; print what each family\n"
               "notices of the other");
  app.add_option("--turns", options.turns, "with --compare and --isolation: turns")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--json", options.json, "write everything to this file")->type_name("FILE");
  app.add_flag("--verbose", options.verbose, "print the plugin's log lines");

  const auto leave = ranks::parse(app, argc, argv, [&] {
    ranks::check_job(app, options.job);
    options.allocations = kAllocations.at(texts.allocations);
    options.requests.prefills = static_cast<std::uint32_t>(options.prefills);
    options.requests.engines = static_cast<std::uint32_t>(options.decodes) / options.tp_ratio;
    if (texts.idle != "none") options.idle = texts.idle == "kv" ? FamilyId::kKv : FamilyId::kLf;
    finish(options, {app.count("--procs") > 0, warmup->count() > 0}, texts);
  });
  if (leave) return *leave;
  return options;
}

std::vector<Request> make_requests(const Options& options) {
  if (options.request_file.empty()) return generate_requests(options.requests);
  std::ifstream file(options.request_file);
  if (!file) throw usage("cannot read " + options.request_file);
  try {
    auto requests = read_requests(file, options.request_file, options.requests);
    if (requests.empty()) throw usage(options.request_file + ": no requests");
    return requests;
  } catch (const std::invalid_argument& refused) {
    throw usage(refused.what());
  }
}

}  // namespace verbatim::kv
