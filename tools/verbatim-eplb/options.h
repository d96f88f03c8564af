// The command line of verbatim-eplb.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "memory/memory.h"
#include "nixl/run.h"
#include "ranks/options.h"

namespace verbatim::eplb {

enum class Mode : std::uint8_t {
  kPerTensor,  // a call for each tensor, directly from and into the rows, as in vLLM's PyNccl communicator
  kPacked,     // each expert is packed once, one call for each expert
  kDirect,     // over the plugin's table: one grouped receive for each expert
  kPut,        // over the plugin's RMA table or NCCL's host calls for it: a put for each tensor, without receives
};
const char* mode_name(Mode mode);

// With how many peers a rank exchanges experts at a time.
enum class PeersAtATime : std::uint8_t {
  kAll,
  kOne,  // in batches, as vLLM does with migration batching
};
const char* schedule_name(PeersAtATime peers);  // "all" or "batched", as --schedule takes it

enum class Over : std::uint8_t { kPlugin, kNccl, kNixl };

// The error to introduce; the run must detect it.
enum class Inject : std::uint8_t {
  kNothing,
  kFlipByte,       // one bit of a slot, or of a received row, changes
  kDtypeOrder,     // unpacks as if tensors of one type were adjacent
  kWrongSlot,      // sends an expert from another expert's row
  kSwapReceives,   // exchanges the destinations of two receives
  kDropDuplicate,  // does not fill a duplicate
  kWriteGuard,     // writes a byte behind a row
  kSwapOrder,      // posts two receives from one peer in the wrong order
};

const char* inject_name(Inject inject);

struct Options {
  ranks::Job job;

  std::string preset = "tiny-mixed";
  std::string policy = "shuffle";  // or trace=FILE
  std::string tensors;             // instead of the preset's
  std::size_t experts = 0;         // 0: the preset's
  std::size_t redundant = 0;
  bool has_redundant = false;
  std::size_t layers = 0;  // 0: the preset's
  std::size_t scale = 1;
  std::uint64_t seed = 1;

  Mode mode = Mode::kPacked;
  PeersAtATime peers = PeersAtATime::kAll;
  Over over = Over::kPlugin;
  memory::Kind memory = memory::Kind::kHost;  // over the plugin's table
  memory::Pages pages = memory::Pages::kHuge;
  nixl::Python python;
  std::string plugin;
  int api_version = 0;
  std::string nccl = "libnccl.so.2";
  std::string cuda = "libcuda.so.1";
  std::size_t ops_per_group = 128;  // 0: no limit
  std::size_t chunk_bytes = std::size_t{128} << 10;
  int depth = 8;
  int iterations = 1;
  int warmup = 0;  // iterations before the timed ones
  bool check = true;
  Inject inject = Inject::kNothing;
  int delay_ms = 0;
  int watchdog_s = 60;

  bool plan_only = false;
  std::string compare;  // entries, kCompareSchedules, kCompareModes, or nixl::kName
  int rounds = 5;
  std::string json;
  bool plugin_log = false;

  int total_iterations() const { return warmup + iterations; }
};
// The value of --compare that runs each schedule in turn, instead of a list of networks or plugins.
constexpr const char* kCompareSchedules = "schedules";
// The value that runs modes in turn: packed, direct (over NCCL per-tensor) and put.
constexpr const char* kCompareModes = "modes";

std::variant<Options, cli::EarlyExit> parse_options(int argc, const char* const* argv);

}  // namespace verbatim::eplb
