// The GPUs of a test, through the libcuda that CUDA_TEST_LIBRARY names: the stand-in, or NVIDIA's. Their memory is
// filled and read by copies between it and pinned memory on streams of the test, so that this is possible beside a
// kernel that spins. With the stand-in these copies are not late: they find what is in memory at this moment, also when
// a late copy of the device is under way.
#pragma once

#include <cstddef>
#include <cstdint>

#include "support/cuda/standin_cuda.h"

namespace verbatim::test {

// Throws std::runtime_error unless the call has succeeded.
void require(CUresult result, const char* call);

// Initialized at the first call, with the primary context of each GPU. A process that never calls it opens no libcuda.
const Cuda& cuda();
unsigned gpu_count();
// Makes the primary context of this GPU current in the calling thread. Throws when CUDA refuses.
void use_gpu(unsigned gpu);
// The same where the context may be gone.
CUresult try_use_gpu(unsigned gpu);
// False: an earlier operation of the GPU failed, and its context is unusable.
bool is_gpu_usable(unsigned gpu);

// How late the copies of this process are with the stand-in, on average.
constexpr unsigned kUsualDelayUs = 30;
void set_copy_delay_us(unsigned mean);

// Both wait for the end. False: a copy failed.
bool upload(unsigned gpu, std::uint64_t address, const void* from, std::size_t bytes);
bool download(void* to, unsigned gpu, std::uint64_t address, std::size_t bytes);

// Memory that cuMemMap mapped, of one or several handles of equal size.
struct MappedMemory {
  std::uint64_t start = 0;
  std::size_t bytes = 0;
  std::size_t handle_bytes = 0;
};
// Each handle has at least `bytes`. `is_exportable`: other processes can map it.
MappedMemory map_memory(unsigned gpu, std::size_t bytes, bool is_exportable, std::size_t handles = 1);
void unmap(const MappedMemory& memory);

constexpr std::size_t kCudaPageBytes = 4096;  // dma-bufs consist of whole pages
constexpr std::uint64_t page_of(std::uint64_t address) {
  return address / kCudaPageBytes * kCudaPageBytes;
}
// CUDA's dma-buf of the pages that contain these bytes.
CUresult export_dmabuf(std::uint64_t address, std::size_t bytes, int& fd);

}  // namespace verbatim::test
