// Addresses of GPU memory in the tables of softverbs. They are marked, because only CUDA can access them: bit 63, which
// no address of a program has; bit 62 if the device reaches the memory through its Data Direct interface; and the
// number of the GPU in the five bits below. CUDA's own addresses have at most 57 bits.
#pragma once

#include <cstdint>

namespace verbatim::softverbs {

constexpr std::uint32_t kMaxGpus = 32;
constexpr unsigned kGpuShift = 57;

// How a device reaches memory. Its writes on one path have no order with those on another.
enum class MemoryPath : std::uint8_t { kHost, kGpu, kGpuDataDirect };
constexpr MemoryPath kMemoryPaths[] = {MemoryPath::kHost, MemoryPath::kGpu, MemoryPath::kGpuDataDirect};

constexpr bool is_gpu_address(std::uint64_t address) {
  return (address >> 63) != 0;
}
constexpr MemoryPath path_to(std::uint64_t address) {
  if (!is_gpu_address(address)) return MemoryPath::kHost;
  return (address >> 62 & 1) != 0 ? MemoryPath::kGpuDataDirect : MemoryPath::kGpu;
}
// `gpu`: its number in the process that owns the memory.
constexpr std::uint64_t mark_gpu_address(std::uint32_t gpu, bool data_direct, std::uint64_t address) {
  return std::uint64_t{1} << 63 | std::uint64_t{data_direct} << 62 | std::uint64_t{gpu} << kGpuShift | address;
}
constexpr std::uint32_t gpu_of(std::uint64_t address) {
  return static_cast<std::uint32_t>(address >> kGpuShift) % kMaxGpus;
}
constexpr std::uint64_t cuda_address(std::uint64_t address) {
  return address & ((std::uint64_t{1} << kGpuShift) - 1);
}

}  // namespace verbatim::softverbs
