// Puts experts by NCCL's host calls, in GPU memory: the weights and the new rows are symmetric windows of ncclMemAlloc,
// and each tensor goes from where it lies into the new rows of the peer. No kernel runs. NCCL and CUDA are opened at
// run time.
#include <sched.h>

#include "memory/cuda_memory.h"
#include "ncclapi/nccl.h"
#include "ncclapi/nccl_puts.h"
#include "verbatim-eplb/transport.h"

namespace verbatim::eplb {
namespace {

using ncclapi::Nccl;
using ncclapi::NcclPuts;

// GPU memory that NCCL has allocated.
class WindowMemory final : public memory::Memory {
 public:
  explicit WindowMemory(const Options& options)
      : gpu_(options.cuda, options.job.rank, memory::CudaMemory::Allocations::kExact), nccl_(options.nccl) {}
  ~WindowMemory() override {
    for (std::byte* const data : allocated_) nccl_.free(data);
  }

  bool is_host() const override { return false; }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override { gpu_.copy(to, from, bytes); }
  void upload(std::byte* to, const void* from, std::size_t bytes) override { gpu_.upload(to, from, bytes); }
  void download(void* to, const std::byte* from, std::size_t bytes) override { gpu_.download(to, from, bytes); }
  void finish() override { gpu_.finish(); }
  const char* registered_by(const ranks::LoadedPlugin&, int) const override { return "ncclCommWindowRegister"; }
  void* register_at(const ranks::LoadedPlugin&, int, void*, std::byte*, std::size_t) const override {
    throw ranks::Failure("NCCL registers its memory itself");
  }
  std::string describe() const override { return gpu_.describe(); }
  std::size_t in_use() const override { return gpu_.in_use(); }

  const NcclPuts& nccl() const { return nccl_; }
  memory::Gpu::Stream stream() const { return gpu_.stream(); }
  bool idle() const { return gpu_.idle(); }

 private:
  std::byte* do_allocate(std::size_t bytes) override { return allocated_.emplace_back(nccl_.allocate(bytes)); }

  memory::CudaMemory gpu_;
  const NcclPuts nccl_;
  std::vector<std::byte*> allocated_;
};

class NcclPutTransport final : public Transport {
 public:
  NcclPutTransport(const Options& options, ranks::CoordinatorConnection& coordinator)
      : options_(options), coordinator_(coordinator), memory_(options), nccl_(options.nccl) {
    const auto ranks = static_cast<std::size_t>(options.job.nranks);
    counters_.sent.resize(ranks);
    counters_.received.resize(ranks);
  }

  memory::Memory& memory() override { return memory_; }

  void connect(const std::set<std::pair<int, int>>&, const std::vector<ranks::Piece>& pieces) override {
    Nccl::UniqueId id{};
    if (options_.job.rank == 0) id = nccl_.make_id();
    id = coordinator_.all_gather_values(id).front();
    comm_ = nccl_.init(options_.job.nranks, id, options_.job.rank);
    for (const ranks::Piece& piece : pieces) {
      windows_.push_back(memory_.nccl().add_window(comm_, piece.data, piece.bytes));
    }
  }

  // NCCL starts all puts of a group at once; without a group each one would wait for the end of the one before. They
  // are queued before the wait, so that no rank waits for one that waits for it.
  void run_group(std::span<const Operation> operations, std::size_t) override {
    std::vector<int> wanted(counters_.received.size());  // signals, by peer: each put has one
    nccl_.group_start();
    for (const Operation& operation : operations) {
      const auto peer = static_cast<std::size_t>(operation.peer);
      for (std::size_t i = 0; i < operation.parts.size(); ++i) {
        const Part& part = operation.parts[i];
        if (part.bytes == 0) continue;
        if (!operation.sends) {
          ++wanted[peer];
          continue;
        }
        memory_.nccl().put_signal(part.data, part.bytes, operation.peer, windows_[kTargetPiece],
                                  operation.target_offsets[i], comm_, memory_.stream());
        ++counters_.messages;
      }
      (operation.sends ? counters_.sent : counters_.received)[peer] += operation.bytes();
      ++counters_.operations;
    }
    nccl_.group_end();
    std::vector<NcclPuts::Signals> signals;
    for (std::size_t peer = 0; peer < wanted.size(); ++peer) {
      if (wanted[peer] > 0) signals.push_back({wanted[peer], static_cast<int>(peer)});
    }
    memory_.nccl().wait(signals, comm_, memory_.stream());
  }

  void finish() override {
    while (!memory_.idle()) {
      nccl_.check_async(comm_);
      sched_yield();
    }
  }

  void close() override {
    if (comm_ == nullptr) return;
    for (const NcclPuts::Window window : windows_) memory_.nccl().remove_window(comm_, window);
    nccl_.destroy(comm_);
  }

  ranks::Json describe() const override { return describe_nccl(nccl_.version(), memory_); }

 private:
  const Options& options_;
  ranks::CoordinatorConnection& coordinator_;
  WindowMemory memory_;
  const Nccl nccl_;
  Nccl::Comm comm_ = nullptr;
  std::vector<NcclPuts::Window> windows_;  // by piece
};

}  // namespace

std::unique_ptr<Transport> make_nccl_put_transport(const Options& options, ranks::CoordinatorConnection& coordinator) {
  return std::make_unique<NcclPutTransport>(options, coordinator);
}

}  // namespace verbatim::eplb
