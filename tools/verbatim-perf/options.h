// The command line of verbatim-perf: the operation, the plugin and the ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "memory/memory.h"
#include "ranks/options.h"
#include "workload/content.h"

namespace verbatim::perf {

using cli::EarlyExit;
using ranks::ExitStatus;
using ranks::Failure;

enum class OperationKind : std::uint8_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kBroadcast,
  kReduce,
  kAllToAll,
  kAllToAllV,
  kGather,
  kScatter,
  kHypercube,
  kSendRecv,
  kStream,
  kPingPong,
  kGrouped,
  // Over the RMA table:
  kPut,
  kPutSignal,
  kGet,
  kAllToAllPut,
};
const char* operation_name(OperationKind kind);
bool is_put_operation(OperationKind kind);
bool reduces(OperationKind kind);
bool has_root(OperationKind kind);
// Whether nccl-tests prints the name of the reduction: sendrecv has one there, too, without a reduction.
bool shows_reduction(OperationKind kind);

enum class Format : std::uint8_t { kVerbatim, kNcclTests };

// Which time of the ranks is reported: nccl-tests' -a.
enum class Average : std::uint8_t { kRank0, kMean, kMin, kMax };

struct Options {
  OperationKind operation = OperationKind::kAllReduce;
  std::string plugin;
  int api_version = 0;  // 0: the newest table that the plugin exports
  int merge = 0;        // devices that are merged into one; 0: all devices are used, none is merged
  memory::Kind memory = memory::Kind::kHost;
  std::string cuda = "libcuda.so.1";

  ranks::Job job;

  int channels = 1;
  std::size_t chunk_bytes = 0;  // 0: the operation's default
  int depth = 8;                // receives posted ahead per connection; puts under way per context and peer
  int contexts = 1;             // of puts
  int group = 0;                // members of a grouped receive; 0: the plugin's maximum, at most 8

  // The defaults of nccl-tests.
  std::size_t min_bytes = std::size_t{32} << 20;
  std::size_t max_bytes = std::size_t{32} << 20;
  double factor = 1;  // from one size to the next; 1: step_bytes is added instead
  std::size_t step_bytes = std::size_t{1} << 20;
  int iterations = 20;
  int warmup_iterations = 1;
  int check_iterations = 1;
  // The sizes run once for each type, reduction and root.
  std::vector<workload::ElementType> types = {workload::ElementType::kFloat};
  std::vector<workload::ReductionKind> reductions = {workload::ReductionKind::kSum};
  std::vector<int> roots = {-1};  // -1: the operation has no root
  int cycles = 1;                 // how often; 0: until the timeout
  int unalign = 0;                // elements by which the buffers begin behind a page boundary
  int threads = 1;                // as the header of nccl-tests names them: threads * gpus are the ranks of one process
  int gpus = 1;
  bool per_iteration = false;  // columns of nccl-tests' table
  int per_iteration_skip = 0;
  bool timestamps = false;
  std::string nccl_tests_json;         // a file for nccl-tests' JSON
  std::vector<std::string> arguments;  // for this file
  double required_busbw = -1;          // NCCL_TESTS_MIN_BW; -1: none
  Average average = Average::kMean;
  Format format = Format::kVerbatim;

  std::vector<std::string> compare;  // plugins that run in turn
  int rounds = 10;                   // with compare

  std::string json;
  int pause_us = 0;  // how long a rank sleeps after a poll without progress; 0: it calls sched_yield
  bool plugin_log = false;
  std::vector<std::string> notes = {};  // on options of nccl-tests without effect
};

std::variant<Options, EarlyExit> parse_options(int argc, const char* const* argv);

// The message sizes of the run, in ascending order.
std::vector<std::size_t> message_sizes(const Options& options);

}  // namespace verbatim::perf
