// Two ranks of an RMA communicator in this process: rank 0 puts to rank 1, called as NCCL's progress thread does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "memory/memory.h"
#include "nccl/rma_v14.h"
#include "netapi/rma.h"

namespace verbatim::perf::cost {

// Functions of the plugin's table, for rates: called directly, as NCCL does.
struct PutCalls {
  decltype(nccl::rma_v14::Rma::iput) iput;
  decltype(nccl::rma_v14::Rma::test) test;
};

// Used by one thread. Throws Failure when the plugin fails.
class MeasuredPuts {
 public:
  // Puts of a burst, all started before the first test.
  static constexpr int kBurst = 8;
  // Puts of a stream.
  static constexpr std::size_t kUnderWay = 32;

  // Puts of `most_bytes` at most.
  MeasuredPuts(std::unique_ptr<netapi::RmaPlugin> plugin, std::size_t most_bytes);
  ~MeasuredPuts();
  MeasuredPuts(const MeasuredPuts&) = delete;
  MeasuredPuts& operator=(const MeasuredPuts&) = delete;

  const netapi::RmaPlugin& plugin() const { return *plugin_; }

  // One after the other, each tested until it is done.
  void put(std::size_t bytes, int times);
  void put_signal(std::size_t bytes, int times);
  // `times` puts in bursts.
  void put_bursts(std::size_t bytes, int times);
  // `times` puts, of which `kUnderWay` are started before the oldest is tested.
  void put_stream(std::size_t bytes, std::size_t times);
  // Throws Failure when the bytes or the signal that have arrived are wrong.
  void check(std::size_t bytes) const;

  // Starts a get that must not complete (a fault of the device), and tests it. False: the plugin has no gets.
  bool start_get();
  void test_incomplete(int times);

 private:
  struct RankState {
    void* instance = nullptr;
    void* listen = nullptr;
    void* coll = nullptr;
    void* contexts = nullptr;
    void* data = nullptr;   // handle of `bytes`
    void* words = nullptr;  // handle of `signal`
    std::byte* bytes = nullptr;
    alignas(8) std::uint64_t signal = 0;
  };

  // A call that all ranks must make at the same time.
  void collective(const std::function<nccl::Result(RankState&, int rank)>& call, const char* name);
  void start_put(std::size_t bytes, void** request);
  void finish(void* request);

  const std::unique_ptr<netapi::RmaPlugin> plugin_;
  const PutCalls calls_;
  const std::size_t most_bytes_;
  const std::unique_ptr<memory::Memory> memory_ = memory::make_host_memory();
  RankState ranks_[2];
  std::uint64_t signals_ = 0;  // that were sent
  void* incomplete_ = nullptr;
};

}  // namespace verbatim::perf::cost
