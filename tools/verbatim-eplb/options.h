// The command line: what moves, between whom, over what.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "ranks/options.h"

namespace verbatim::eplb {

enum class Mode : std::uint8_t {
  kPerTensor,         // a call for each tensor, from the row and into the row: vLLM's PyNccl communicator
  kPacked,            // each expert packed once, one call for each expert
  kBatched,           // the same with one peer a rank at a time
  kBatchedPerTensor,  // per tensor with one peer a rank at a time
  kDirect,            // over the plugin's table: one grouped receive for each expert
};
const char* mode_name(Mode mode);
inline bool is_packed(Mode mode) {
  return mode == Mode::kPacked || mode == Mode::kBatched;
}
inline bool is_batched(Mode mode) {
  return mode == Mode::kBatched || mode == Mode::kBatchedPerTensor;
}

enum class Over : std::uint8_t { kPlugin, kNccl };

// What is done wrong on purpose: the run must find it.
enum class Inject : std::uint8_t {
  kNothing,
  kFlipByte,       // a byte of a slot, or of a received row, changes
  kDtypeOrder,     // unpacked as if tensors of one type lay together
  kWrongSlot,      // an expert is sent from the row beside its own
  kSwapReceives,   // two receives exchange their places
  kDropDuplicate,  // a duplicate is not filled
  kWriteGuard,     // a byte behind a row is written
  kSwapOrder,      // two receives from one peer are posted in the wrong order
};

struct Options {
  ranks::Job job;

  std::string preset = "tiny-mixed";
  std::string policy = "shuffle";  // or trace=FILE
  std::string tensors;             // in place of the preset's
  std::size_t experts = 0;         // 0: the preset's
  std::size_t redundant = 0;
  bool has_redundant = false;
  std::size_t layers = 0;  // 0: the preset's
  std::size_t scale = 1;
  std::uint64_t seed = 1;

  Mode mode = Mode::kPacked;
  Over over = Over::kPlugin;
  std::string plugin;
  int api_version = 0;
  std::string nccl = "libnccl.so.2";
  std::string cuda = "libcuda.so.1";
  std::size_t ops_per_group = 128;  // 0: no limit
  std::size_t chunk_bytes = std::size_t{128} << 10;
  int depth = 8;
  int iterations = 1;
  int warmup = 0;  // iterations before those that are timed
  bool check = true;
  Inject inject = Inject::kNothing;
  int delay_ms = 0;
  int watchdog_s = 60;

  bool plan_only = false;
  std::string compare;
  int turns = 5;
  std::string json;
  bool verbose = false;

  int rounds() const { return warmup + iterations; }
};
std::variant<Options, ranks::EarlyExit> parse_options(int argc, const char* const* argv);

}  // namespace verbatim::eplb
