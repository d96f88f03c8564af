// Memory of a test at any place: host memory, or memory of a GPU that CUDA_TEST_LIBRARY provides (the stand-in or
// NVIDIA's libcuda). GPU memory is filled and read by copies between it and pinned memory on streams of the tests, so
// that this is possible beside a kernel that spins. With the stand-in these copies are not late: they find what is in
// memory at this moment, also when a late copy of the device is under way.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "memory.h"
#include "support/cuda/standin_cuda.h"

namespace gpu_direct {

// Initialized at the first call, with the primary context of each GPU.
const verbatim::test::Cuda& cuda();
void use_gpu(int gpu);  // makes its context current in the calling thread

enum class Kind : std::uint8_t {
  kAllocated,  // cuMemAlloc
  kSmall,      // cuMemAlloc of `size` bytes alone, without guards: its pages have other allocations
  kMapped,     // cuMemMap; other processes can map it
  kPrivate,    // cuMemMap; other processes cannot map it
};
enum class How : std::uint8_t {
  kDmabuf,          // a dma-buf of the pages of the range, offset 0, as NCCL
  kDmabufAtOffset,  // a dma-buf of the allocation's pages, with the offset of the range
  kPlain,           // regMr with NCCL_PTR_CUDA
};

constexpr int kHost = -1;
// Trivially copyable, because it is sent between processes.
struct Place {
  int gpu = kHost;
  Kind kind = Kind::kAllocated;
  How how = How::kDmabuf;

  bool is_gpu() const { return gpu != kHost; }
};
std::string name_of(const Place& place);

// Like conformance::Memory: poisoned, with guards at both sides, and compared as a whole with the expected content.
class Buffer {
 public:
  // `size` bytes that start `offset` bytes after a page boundary.
  explicit Buffer(const Place& place, std::size_t size, std::size_t offset = 0);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const Place& place() const { return place_; }
  unsigned char* data();
  std::size_t size() const { return size_; }
  CUdeviceptr start() const { return start_; }  // of the allocation

  void write(std::size_t at, std::size_t size, std::uint64_t seed);
  void expect(std::size_t at, std::size_t size, std::uint64_t seed);
  ::testing::AssertionResult intact();
  // Frees or unmaps the memory, whatever still accesses it.
  void free();

 private:
  void map();
  void upload(std::size_t from, std::size_t bytes);
  bool download();

  const Place place_;
  const std::size_t size_;
  const std::size_t before_;    // bytes of the allocation before data()
  conformance::Memory shadow_;  // of the host memory itself, or a copy of the GPU's allocation
  CUdeviceptr start_ = 0;
  std::size_t mapped_bytes_ = 0;
};

// CUDA's dma-buf of the pages that have these bytes; a failure of the test and -1 without one.
int dmabuf_of(CUdeviceptr address, std::size_t bytes);

constexpr std::size_t kPageBytes = 4096;
constexpr CUdeviceptr page_of(CUdeviceptr address) {
  return address / kPageBytes * kPageBytes;
}

}  // namespace gpu_direct
