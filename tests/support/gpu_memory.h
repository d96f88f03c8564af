// Memory regions of tests in host memory and in GPU memory (support/cuda/gpus.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "support/cuda/gpus.h"
#include "support/verbs_fixture.h"

namespace verbatim::test {

enum class MemoryKind : std::uint32_t {
  kHost,
  kLegacy,      // cuMemAlloc; other processes can map it
  kExportable,  // cuMemMap; other processes can map it
  kPrivate,     // cuMemMap; other processes cannot map it
  kJoined,      // as kExportable, of two handles that meet in the middle of the payload
  kImported,    // kLegacy memory of another process; without guards
};

enum class Registration : std::uint32_t { kDmabuf, kPlain };

// Trivially copyable, because it is sent between processes.
struct Place {
  MemoryKind kind = MemoryKind::kHost;
  unsigned gpu = 0;  // modulo the number of GPUs
  Registration registration = Registration::kDmabuf;
  std::array<char, 64> ipc_handle{};  // of kImported

  bool is_gpu() const { return kind != MemoryKind::kHost; }
};
std::string name_of(const Place& place);

// As GuardedBuffer, in GPU memory.
class GpuBuffer {
 public:
  GpuBuffer(const Place& place, std::size_t size, std::size_t misalign);
  ~GpuBuffer();
  GpuBuffer(const GpuBuffer&) = delete;
  GpuBuffer& operator=(const GpuBuffer&) = delete;

  std::uint64_t start() const { return start_; }  // of the allocation
  std::uint64_t address() const { return start_ + offset_; }
  std::size_t size() const { return size_; }
  void write(std::size_t offset, std::span<const std::byte> bytes) const;
  std::vector<std::byte> read(std::size_t offset, std::size_t length) const;
  void poison() const;
  std::string untouched_outside(std::size_t offset, std::size_t length) const;
  // Frees or unmaps the memory at once, also if something still accesses it.
  void free();

 private:
  const MemoryKind kind_;
  const unsigned gpu_;
  const std::size_t size_;
  std::uint64_t start_ = 0;  // of the allocation; 0: freed
  MappedMemory mapped_;      // of memory that cuMemMap mapped
  std::size_t guard_ = 0;    // bytes on both sides of the payload
  std::size_t offset_ = 0;   // of the payload in the allocation
};

constexpr int kAtomicAccess = kAllAccess | IBV_ACCESS_REMOTE_ATOMIC;

// As Region, in memory of any kind. Offsets are within the payload.
class PlacedRegion {
 public:
  PlacedRegion(ibv_pd* pd, const Place& place, std::size_t size, std::size_t misalign = 0, int access = kAtomicAccess);

  const Place& place() const { return place_; }
  std::size_t size() const { return size_; }
  std::uint64_t address(std::size_t offset = 0) const;
  ibv_sge sge(std::size_t offset, std::size_t length) const;
  ibv_sge sge() const { return sge(0, size_); }
  SendOptions target(std::uint64_t wr_id = 0, std::size_t offset = 0) const;

  void write(std::size_t offset, std::span<const std::byte> bytes) const;
  std::vector<std::byte> read(std::size_t offset, std::size_t length) const;
  std::uint64_t read_word(std::size_t offset) const;
  void write_word(std::size_t offset, std::uint64_t word) const;
  // The byte at `offset` has position 0 of the pattern.
  void fill(std::size_t offset, std::size_t length, std::uint64_t seed) const;
  void fill(std::uint64_t seed) const { fill(0, size_, seed); }
  std::optional<std::size_t> find_wrong_byte(std::size_t offset, std::size_t length, std::uint64_t seed) const;
  void poison() const;
  std::string untouched_outside(std::size_t offset, std::size_t length) const;

  // Deregisters the memory and frees it at once.
  void release();
  // Frees GPU memory that stays registered.
  void free() { gpu_->free(); }
  const GpuBuffer& gpu_buffer() const { return *gpu_; }

 private:
  const Place place_;
  const std::size_t size_;
  std::optional<GuardedBuffer> host_;
  std::optional<GpuBuffer> gpu_;

 public:
  Mr mr;  // is destroyed before the memory
};

// CUDA's dma-buf of the pages that contain these bytes.
int dmabuf_of(std::uint64_t address, std::size_t bytes);
// Registers GPU memory by its dma-buf; nullptr and errno on failure.
ibv_mr* reg_dmabuf(ibv_pd* pd, std::uint64_t address, std::size_t bytes, int access = kAtomicAccess);

}  // namespace verbatim::test
