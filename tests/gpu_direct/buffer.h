// Memory of a test at any place: host memory, or memory of a GPU (support/cuda/gpus.h).
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "memory.h"
#include "support/cuda/gpus.h"

namespace gpu_direct {

using verbatim::test::cuda;
using verbatim::test::page_of;
using verbatim::test::require;
using verbatim::test::use_gpu;
constexpr std::size_t kPageBytes = verbatim::test::kCudaPageBytes;

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
  unsigned gpu() const { return static_cast<unsigned>(place_.gpu); }
  void upload(std::size_t from, std::size_t bytes);
  bool download();

  const Place place_;
  const std::size_t size_;
  const std::size_t before_;    // bytes of the allocation before data()
  conformance::Memory shadow_;  // of the host memory itself, or a copy of the GPU's allocation
  CUdeviceptr start_ = 0;
  verbatim::test::MappedMemory mapped_;
};

// CUDA's dma-buf of the pages that have these bytes; a failure of the test and -1 without one.
int dmabuf_of(CUdeviceptr address, std::size_t bytes);

}  // namespace gpu_direct
