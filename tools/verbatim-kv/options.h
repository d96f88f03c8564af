// The command line of verbatim-kv: the model, the ranks, the requests and the faults to inject.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "memory/memory.h"
#include "nixl/run.h"
#include "ranks/options.h"
#include "verbatim-kv/cache.h"
#include "verbatim-kv/inject.h"
#include "workload/kv/family.h"
#include "workload/kv/requests.h"

namespace verbatim::kv {

using ranks::ExitStatus;
using ranks::Failure;

// kDirect: over the plugin's table, one message per block. kNccl: through NCCL, one message per request. kNixl: through
// NIXL, one transfer per request, whose pieces are blocks. kPut: over the plugin's RMA table, one put per block.
// kNcclPut: the same by NCCL's host calls, on GPUs.
enum class Mode : std::uint8_t { kDirect, kNccl, kNixl, kPut, kNcclPut };
const char* mode_name(Mode mode);
inline bool is_over_nccl(Mode mode) {
  return mode == Mode::kNccl || mode == Mode::kNcclPut;
}
const char* allocations_name(Allocations allocations);

// The value of --compare that runs --mode direct and then --mode put over --plugin, instead of a list.
constexpr const char* kCompareModes = "modes";

struct Options {
  Mode mode = Mode::kDirect;
  std::string nccl = "libnccl.so.2";
  std::string cuda = "libcuda.so.1";
  memory::Kind memory = memory::Kind::kHost;  // of kDirect
  memory::Pages pages = memory::Pages::kHuge;
  nixl::Python python;
  std::string plugin;
  int api_version = 0;  // 0: the newest table that the plugin exports
  ranks::Job job;

  std::string preset = "deepseek-mla-bf16";
  std::uint32_t scale = 8;
  int prefills = 1;
  int decodes = 1;
  std::uint32_t tp_ratio = 1;
  std::vector<Geometry> geometries;  // of KV and, if enabled, LF

  RequestSettings requests;
  std::size_t warmup = 0;  // number of first requests that are served before the others and not timed
  std::string request_file;
  std::size_t concurrency = 8;
  std::size_t blocks = 0;  // per family and rank; 0: 1.5 times what the requests in flight need
  double fragmentation = 0.5;
  Allocations allocations = Allocations::kSlab;
  int depth = 32;  // grouped receives posted ahead per connection
  int group = 0;   // members of a receive; 0: the plugin's maximum, at most 8
  bool check = true;
  std::uint32_t request_timeout_ms = 10'000;  // a request without progress for this time has failed
  std::uint32_t stage_timeout_ms = 10'000;    // for a new connection, and for a staged copy without progress
  std::vector<Fault> faults;
  std::optional<FamilyId> idle;  // this family has memory and connections, but no requests

  std::string compare;
  bool isolation = false;
  int rounds = 5;
  std::string json;
  bool plugin_log = false;

  int engines() const { return decodes / static_cast<int>(tp_ratio); }
  bool compares_with_nixl() const;
  bool compares_modes() const { return compare == kCompareModes; }
  bool is_timed(const Request& request) const { return request.id >= warmup; }
};

std::variant<Options, cli::EarlyExit> parse_options(int argc, const char* const* argv);

// Makes the requests from the options. Throws Failure.
std::vector<Request> make_requests(const Options& options);

}  // namespace verbatim::kv
