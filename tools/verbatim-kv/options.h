// The command line: which model's caches, between how many ranks, which requests, and what is to go wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "ranks/options.h"
#include "verbatim-kv/cache.h"
#include "verbatim-kv/inject.h"
#include "workload/kv/family.h"
#include "workload/kv/requests.h"

namespace verbatim::kv {

using ranks::ExitStatus;
using ranks::Failure;

// Over the plugin's table, or through NCCL with each request gathered.
enum class Mode : std::uint8_t { kDirect, kNccl };

struct Options {
  Mode mode = Mode::kDirect;
  std::string nccl = "libnccl.so.2";
  std::string cuda = "libcuda.so.1";
  std::string plugin;
  int api_version = 0;  // 0: the newest that the plugin has
  ranks::Job job;

  std::string preset = "deepseek-mla-bf16";
  std::uint32_t scale = 8;
  int prefills = 1;
  int decodes = 1;
  std::uint32_t tp_ratio = 1;
  std::vector<Geometry> geometries;  // of KV and, where wanted, LF

  RequestSettings requests;
  std::size_t warmup = 0;  // of the requests: served before the others, and not timed
  std::string request_file;
  std::size_t concurrency = 8;
  std::size_t blocks = 0;  // of each family and rank; 0: as many as the requests in flight can need, and half again
  double fragmentation = 0.5;
  Allocations allocations = Allocations::kSlab;
  int depth = 32;  // grouped receives posted ahead on a connection
  int group = 0;   // members of a receive; 0: what the plugin has
  bool check = true;
  std::uint32_t request_timeout_ms = 10'000;  // without progress
  std::uint32_t stage_timeout_ms = 10'000;    // to make a fresh connection, and for a staged copy without progress
  std::vector<Fault> faults;
  std::optional<FamilyId> idle;  // has memory and connections, and no requests

  std::string compare;
  bool isolation = false;
  int turns = 5;
  std::string json;
  bool verbose = false;

  int engines() const { return decodes / static_cast<int>(tp_ratio); }
  bool is_timed(const Request& request) const { return request.id >= warmup; }
};

std::variant<Options, ranks::EarlyExit> parse_options(int argc, const char* const* argv);

// The requests that the options ask for. Throws Failure.
std::vector<Request> make_requests(const Options& options);

}  // namespace verbatim::kv
