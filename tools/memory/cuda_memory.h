// The memory of one GPU, with one stream for its copies.
#pragma once

#include "memory/gpu.h"
#include "memory/memory.h"

namespace verbatim::memory {

class CudaMemory final : public Memory {
 public:
  // kWholePages: for memory that a plugin registers, because a dma-buf consists of whole pages. kExact: NCCL aligns the
  // memory that it registers itself.
  enum class Allocations : std::uint8_t { kWholePages, kExact };

  // Throws Failure when there is no library or no GPU.
  CudaMemory(const std::string& library, int rank, Allocations allocations);

  bool is_host() const override { return false; }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override { gpu_.copy(to, from, bytes, stream_); }
  void upload(std::byte* to, const void* from, std::size_t bytes) override { gpu_.upload(to, from, bytes, stream_); }
  void download(void* to, const std::byte* from, std::size_t bytes) override {
    gpu_.download(to, from, bytes, stream_);
  }
  void finish() override { gpu_.synchronize(stream_); }

  // As NCCL decides: dma-buf when plugin and GPU have it, otherwise a registration by address.
  const char* registered_by(const ranks::LoadedPlugin& plugin, int device) const override;
  void* register_at(const ranks::LoadedPlugin& plugin, int device, void* comm, std::byte* data,
                    std::size_t bytes) const override;

  std::string describe() const override { return gpu_.describe(); }
  std::size_t in_use() const override { return gpu_.in_use(); }

  Gpu::Stream stream() const { return stream_; }
  // Whether all operations queued in the stream have completed.
  bool idle() const { return gpu_.idle(stream_); }

 private:
  std::byte* do_allocate(std::size_t bytes) override;
  bool uses_dmabuf(const ranks::LoadedPlugin& plugin, int device) const;

  Gpu gpu_;
  const Gpu::Stream stream_;
  const Allocations allocations_;
};

}  // namespace verbatim::memory
