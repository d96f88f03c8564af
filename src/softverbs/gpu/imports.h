// GPU memory of other GPUs and processes that GPUs of this process can reach. It is mapped by a thread of its own,
// because mapping may wait for kernels; until then, and where it is not possible, copies pass through staging buffers.
#pragma once

#include <cstdint>
#include <memory>

#include "softverbs/gpu/gpu.h"
#include "softverbs/host/process_view.h"

namespace verbatim::softverbs {

class ReachableMemory {
 public:
  virtual ~ReachableMemory() = default;
  // Whether the allocation has these bytes: a region may reach beyond it, to the end of a page.
  bool has(std::uint64_t owners_address, std::size_t bytes) const {
    return owners_address >= owners_start_ && owners_address - owners_start_ + bytes <= bytes_;
  }
  // The address for the copy engines of the GPU that it was mapped for.
  std::uint64_t address(std::uint64_t owners_address) const { return owners_address - owners_start_ + start_; }

 protected:
  ReachableMemory(std::uint64_t owners_start, std::uint64_t start, std::size_t bytes)
      : owners_start_(owners_start), start_(start), bytes_(bytes) {}
  std::uint64_t start() const { return start_; }
  std::size_t bytes() const { return bytes_; }

 private:
  const std::uint64_t owners_start_;
  const std::uint64_t start_;
  const std::size_t bytes_;
};

// `number`: of SharedMr::gpu_memory in the owner's segment. nullptr: GPU `gpu` does not reach the memory, or it is not
// known yet; then the thread finds out. Never waits for CUDA. The result keeps the mapping.
std::shared_ptr<const ReachableMemory> find_reachable(const ProcessView& owner, std::uint32_t number,
                                                      std::uint32_t gpu);

// Starts the thread, at the first call. Called when GPU memory is registered.
Status start_importer();
void forget_imports_of_parent();

}  // namespace verbatim::softverbs
