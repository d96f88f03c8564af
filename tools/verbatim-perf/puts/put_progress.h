// Calls an RMA plugin as NCCL's progress thread does: starts transfers, tests their requests, and waits for signals.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "netapi/rma.h"
#include "verbatim-perf/puts/put_plan.h"

namespace verbatim::perf {

// What a rank has registered at its communicator. The handles name the memory of all ranks.
struct PutMemory {
  void* coll = nullptr;
  void* contexts = nullptr;
  void* send = nullptr;  // null: no bytes
  void* recv = nullptr;
  void* words = nullptr;
  const std::uint64_t* signals = nullptr;  // this rank's words
};

// Used by one thread. Throws Failure.
class PutProgress {
 public:
  PutProgress(netapi::RmaPlugin& plugin, const PutShape& shape, const PutMemory& memory, int depth, int pause_us)
      : plugin_(plugin),
        shape_(shape),
        memory_(memory),
        depth_(static_cast<std::size_t>(depth)),
        pause_us_(pause_us),
        expected_(signal_words(shape)) {}

  void prepare(const std::vector<Transfer>& transfers);
  // Runs all transfers so many times, each up to `depth` ahead, and waits until the signals for this rank have arrived.
  // alltoall_put waits for them in each iteration, before the next one.
  void run(std::uint64_t iterations, std::atomic<std::uint64_t>& finished);

  // Compares all words with what has been signalled, and describes the first that is wrong. Empty: none is.
  std::vector<std::string> wrong_signals() const;

 private:
  struct Lane {
    Transfer transfer;
    std::uint64_t started = 0;
    std::uint64_t done = 0;
    std::deque<void*> requests;
  };

  void run_transfers(std::uint64_t iterations, std::atomic<std::uint64_t>* finished);
  bool advance(Lane& lane, std::uint64_t iterations);
  void start(Lane& lane);
  void wait_for_signals(std::uint64_t iterations);
  bool all_signals_arrived() const;
  std::uint64_t read_word(std::size_t index) const;
  void pause() const;

  netapi::RmaPlugin& plugin_;
  const PutShape shape_;
  const PutMemory memory_;
  const std::size_t depth_;
  const int pause_us_;
  std::vector<Lane> lanes_;
  std::vector<std::uint64_t> expected_;  // values of the words
};

}  // namespace verbatim::perf
