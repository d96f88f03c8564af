// Addresses of GPU memory in the tables of softverbs. They are marked, because only CUDA can access them: bit 63, which
// no address of a program has, and the number of the GPU in the six bits below. CUDA's own addresses have at most 57
// bits.
#pragma once

#include <cstdint>

namespace verbatim::softverbs {

constexpr std::uint32_t kMaxGpus = 64;
constexpr unsigned kGpuShift = 57;

constexpr bool is_gpu_address(std::uint64_t address) {
  return (address >> 63) != 0;
}
// `gpu`: its number in the process that owns the memory.
constexpr std::uint64_t mark_gpu_address(std::uint32_t gpu, std::uint64_t address) {
  return std::uint64_t{1} << 63 | std::uint64_t{gpu} << kGpuShift | address;
}
constexpr std::uint32_t gpu_of(std::uint64_t address) {
  return static_cast<std::uint32_t>(address >> kGpuShift) % kMaxGpus;
}
constexpr std::uint64_t cuda_address(std::uint64_t address) {
  return address & ((std::uint64_t{1} << kGpuShift) - 1);
}

}  // namespace verbatim::softverbs
