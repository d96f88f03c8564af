// Pinned host memory: what copy engines may reach by themselves.
#include <sys/mman.h>
#include <unistd.h>

#include "support/cuda/memory.h"

using standin::Call;
using standin::driver;
using standin::HostRange;
using standin::Memory;

namespace {

constexpr CUdeviceptr kPageMask = 4095;

}  // namespace

STANDIN_EXPORT CUresult cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  Call call(Call::kContext | Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  void* const area = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (area == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  Memory& ours = *driver().memory;
  ours.host_ranges[reinterpret_cast<CUdeviceptr>(area)] = {bytes, &call.context(), true, ours.next_buffer_id()};
  *memory = area;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemFreeHost(void* memory) {
  Call call(Call::kContext | Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  driver().drain(call.lock());
  auto& ranges = driver().memory->host_ranges;
  const auto found = ranges.find(reinterpret_cast<CUdeviceptr>(memory));
  if (found == ranges.end() || !found->second.allocated) return CUDA_ERROR_INVALID_VALUE;
  munmap(memory, found->second.bytes);
  ranges.erase(found);
  return CUDA_SUCCESS;
}

// The driver pins whole pages: a page can be registered once.
STANDIN_EXPORT CUresult cuMemHostRegister_v2(void* memory, size_t bytes, unsigned) {
  Call call(Call::kContext | Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  const auto start = reinterpret_cast<CUdeviceptr>(memory);
  const CUdeviceptr first_page = start & ~kPageMask;
  const CUdeviceptr end_page = (start + bytes + kPageMask) & ~kPageMask;
  Memory& ours = *driver().memory;
  if (bytes == 0 || ours.is_device_address(start)) return CUDA_ERROR_INVALID_VALUE;
  // Fails for addresses at which nothing is mapped.
  if (msync(reinterpret_cast<void*>(first_page), end_page - first_page, MS_ASYNC) != 0) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& [other, range] : ours.host_ranges) {
    const CUdeviceptr other_end = (other + range.bytes + kPageMask) & ~kPageMask;
    if ((other & ~kPageMask) < end_page && first_page < other_end) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  ours.host_ranges[start] = {bytes, &call.context(), false, ours.next_buffer_id()};
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemHostUnregister(void* memory) {
  Call call(Call::kContext | Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  auto& ranges = driver().memory->host_ranges;
  const auto found = ranges.find(reinterpret_cast<CUdeviceptr>(memory));
  if (found == ranges.end() || found->second.allocated) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  ranges.erase(found);
  return CUDA_SUCCESS;
}
