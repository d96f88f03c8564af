// GPU memory of this process that other processes may map, so that their GPUs copy to and from it without this process.
#pragma once

#include <cstdint>
#include <optional>

#include "softverbs/gpu/gpu.h"
#include "softverbs/host/layout.h"

namespace verbatim::softverbs {

// Publishes an allocation in the segment of this process, as often as a region of it is registered. Its number, which
// peers find in SharedMr; 0: it cannot be exported, and this process copies for its peers.
std::uint32_t export_gpu_memory(Segment& segment, const GpuAllocation& allocation);
// Withdraws it when it was called as often. Peers give their mappings up some time later.
void withdraw_gpu_memory(Segment& segment, std::uint32_t number);
// How an allocation of the owner of this segment is mapped, while it has this serial number.
std::optional<GpuMemoryHandle> exported_gpu_memory(const Segment& segment, std::uint32_t number, std::uint64_t serial);
void forget_exports_of_parent();

}  // namespace verbatim::softverbs
