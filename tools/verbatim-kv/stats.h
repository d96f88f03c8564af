// The counters of one family on one rank, and their sums over all ranks.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ranks/json.h"
#include "workload/kv/fallback.h"
#include "workload/kv/validation.h"

namespace verbatim::kv {

struct RejectedRequest {
  std::uint32_t request;
  std::string found_by;  // "decode" or "prefill"
  RejectionCode code;
  std::string text;
};

// How long after its start the decode side knew that a request was rejected.
struct RejectionTime {
  std::uint32_t request;
  std::uint64_t after_ns;
};

// Blocks of a request that were not transferred, in the order of the request from block `first` on.
struct Lost {
  std::uint32_t request;
  std::uint64_t first;
  std::vector<std::uint32_t> blocks;
};

struct FamilyStats {
  // Of both sides:
  std::uint64_t validation_ns = 0;
  std::uint64_t validations = 0;
  std::uint64_t check_ns = 0;  // filling, comparing and CRC, from the first connection to the end of the last request
  std::uint64_t wrong_bytes = 0;
  std::vector<RejectedRequest> rejected = {};
  std::uint64_t connections = 0;
  std::vector<std::string> errors = {};  // descriptions of the first few mismatches and failures
  // Of the prefill side:
  std::uint64_t sent_messages = 0;
  std::uint64_t sent_bytes = 0;
  std::uint64_t notifications = 0;
  // Of the decode side:
  std::uint64_t received_messages = 0;
  std::uint64_t received_bytes = 0;
  std::uint64_t served_bytes = 0;                      // without those of failed attempts
  std::map<std::uint64_t, std::uint64_t> groups = {};  // number of receives by number of members
  std::uint64_t elapsed_ns = 0;                        // from the first announcement to the end of the last request
  std::uint64_t timed_ns = 0;                          // the same without the warm-up
  std::uint64_t timed_messages = 0;                    // without the warm-up
  std::uint64_t timed_bytes = 0;
  std::uint64_t served = 0;
  std::uint64_t fallbacks[kFallbackStages] = {};  // requests that reached each stage
  std::uint64_t crc_errors = 0;
  std::uint64_t crc_sum = 0;      // sum of the CRCs of all served requests: equal in all runs of the same requests
  std::uint64_t fallback_ns = 0;  // the longest time from a request's first failure to its end
  std::vector<std::uint64_t> latencies_ns = {};  // without the warm-up
  std::vector<RejectionTime> rejection_times = {};
  std::vector<Lost> lost = {};

  void add_error(const std::string& what);
  // Adds counts and appends lists; of times it keeps the longest.
  void add(const FamilyStats& other);
};

ranks::Json to_json(const FamilyStats& stats);
// Parses what to_json() made on another rank.
FamilyStats from_json(const ranks::Json& json);

}  // namespace verbatim::kv
