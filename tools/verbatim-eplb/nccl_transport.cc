// Runs operations as NCCL's point-to-point calls, in GPU memory. NCCL and CUDA are opened at run time.
#include <sched.h>

#include "memory/cuda_memory.h"
#include "ncclapi/nccl.h"
#include "verbatim-eplb/transport.h"

namespace verbatim::eplb {
namespace {

using memory::CudaMemory;
using ncclapi::Nccl;

class NcclTransport final : public Transport {
 public:
  NcclTransport(const Options& options, ranks::CoordinatorConnection& coordinator)
      : options_(options),
        coordinator_(coordinator),
        memory_(options.cuda, options.job.rank, CudaMemory::Allocations::kExact),
        nccl_(options.nccl) {
    const auto ranks = static_cast<std::size_t>(options.job.nranks);
    counters_.sent.resize(ranks);
    counters_.received.resize(ranks);
  }

  memory::Memory& memory() override { return memory_; }

  // NCCL itself connects a pair when it has data for the first time.
  void connect(const std::set<std::pair<int, int>>&, const std::vector<ranks::Piece>&) override {
    Nccl::UniqueId id{};
    if (options_.job.rank == 0) id = nccl_.make_id();
    id = coordinator_.all_gather_values(id).front();
    comm_ = nccl_.init(options_.job.nranks, id, options_.job.rank);
  }

  void run_group(std::span<const Operation> operations, std::size_t) override {
    nccl_.group_start();
    for (const Operation& operation : operations) {
      for (const Part& part : operation.parts) {
        if (operation.sends) {
          nccl_.send(part.data, part.bytes, operation.peer, comm_, memory_.stream());
        } else {
          nccl_.recv(part.data, part.bytes, operation.peer, comm_, memory_.stream());
        }
      }
      (operation.sends ? counters_.sent : counters_.received)[static_cast<std::size_t>(operation.peer)] +=
          operation.bytes();
      ++counters_.operations;
    }
    nccl_.group_end();
  }

  void finish() override {
    while (!memory_.idle()) {
      nccl_.check_async(comm_);
      sched_yield();
    }
  }

  void close() override {
    if (comm_ != nullptr) nccl_.destroy(comm_);
  }

  ranks::Json describe() const override { return describe_nccl(nccl_.version(), memory_); }

 private:
  const Options& options_;
  ranks::CoordinatorConnection& coordinator_;
  CudaMemory memory_;
  const Nccl nccl_;
  Nccl::Comm comm_ = nullptr;
};

}  // namespace

std::unique_ptr<Transport> make_nccl_transport(const Options& options, ranks::CoordinatorConnection& coordinator) {
  return std::make_unique<NcclTransport>(options, coordinator);
}

}  // namespace verbatim::eplb
