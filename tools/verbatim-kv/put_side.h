// What the two sides of a family share in --mode put: blocks go from their source to their destination through the
// plugin's RMA table, and the last put of a request carries the signal that its blocks have arrived. One thread
// serves both families, because one thread at a time may use the contexts of an RMA comm. Each family has a context of
// its own, and signal words of its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/memory.h"
#include "netapi/rma.h"
#include "ranks/rma_comm.h"
#include "verbatim-kv/options.h"
#include "verbatim-kv/stats.h"
#include "workload/kv/intervals.h"
#include "workload/kv/requests.h"

namespace verbatim::kv {

struct PutContext {
  const Options& options;
  const ranks::RmaComm& comm;
  memory::Memory& storage;           // contains the blocks
  const IntervalSet& memory;         // the registered parts of it
  const std::vector<void*>& window;  // by interval; a handle names the memory of all ranks
  const std::vector<Request>& requests;
  std::uint32_t index;                   // of this rank among the prefill or the decode ranks
  std::atomic<std::uint64_t>& finished;  // requests finished in all families, for the progress bar
};

// A decode rank has a word for each request in flight, and behind it one that stays 0.
inline std::size_t signal_words(const Options& options) {
  return 2 * options.concurrency;
}
inline std::size_t signal_word(std::uint32_t slot) {
  return std::size_t{2} * slot;
}
// What the signal of a request adds to its word.
inline std::uint64_t signal_value(FamilyId family, std::uint32_t request) {
  return (static_cast<std::uint64_t>(family) + 1) << 32 | (request + std::uint64_t{1});
}

// One family on one rank.
class PutSide {
 public:
  PutSide() = default;
  PutSide(const PutSide&) = delete;
  PutSide& operator=(const PutSide&) = delete;
  virtual ~PutSide() = default;

  virtual bool finished() const = 0;
  // Does what can be done now. Returns whether that was anything. Throws Failure.
  virtual bool step(bool poll_sockets) = 0;
  // Called when all ranks have finished: verifies free blocks and signal words.
  virtual void check() = 0;
  FamilyStats& stats() { return stats_; }

 protected:
  FamilyStats stats_ = {};
};

}  // namespace verbatim::kv
