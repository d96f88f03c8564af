#include "support/gpu_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "base/unique_fd.h"

namespace verbatim::test {

std::string name_of(const Place& place) {
  constexpr const char* kNames[] = {"Host", "Legacy", "Exportable", "Private", "Joined", "Imported"};
  std::string name = kNames[static_cast<std::size_t>(place.kind)];
  if (place.is_gpu()) name += std::to_string(place.gpu);
  return name;
}

GpuBuffer::GpuBuffer(const Place& place, std::size_t size, std::size_t misalign)
    : kind_(place.kind), gpu_(place.gpu % gpu_count()), size_(size) {
  use_gpu(gpu_);
  if (kind_ == MemoryKind::kImported) {
    CUipcMemHandle handle{};
    std::copy(place.ipc_handle.begin(), place.ipc_handle.end(), handle.reserved);
    CUdeviceptr address = 0;
    require(cuda().cuIpcOpenMemHandle_v2(&address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), "cuIpcOpenMemHandle");
    start_ = address;
    return;
  }
  guard_ = kCudaPageBytes;
  offset_ = guard_ + misalign;
  const std::size_t bytes = guard_ + misalign + size + guard_;
  if (kind_ == MemoryKind::kLegacy) {
    CUdeviceptr address = 0;
    require(cuda().cuMemAlloc_v2(&address, bytes), "cuMemAlloc");
    start_ = address;
  } else {
    mapped_ = map_memory(gpu_, bytes, kind_ != MemoryKind::kPrivate, kind_ == MemoryKind::kJoined ? 2 : 1);
    start_ = mapped_.start;
    if (kind_ == MemoryKind::kJoined) offset_ = mapped_.handle_bytes - size_ / 2;
  }
  poison();
}

GpuBuffer::~GpuBuffer() {
  free();
}

void GpuBuffer::free() {
  if (start_ == 0) return;
  static_cast<void>(try_use_gpu(gpu_));  // without the context the memory is gone too
  if (kind_ == MemoryKind::kImported) {
    cuda().cuIpcCloseMemHandle(start_);
  } else if (kind_ == MemoryKind::kLegacy) {
    cuda().cuMemFree_v2(start_);
  } else {
    unmap(mapped_);
  }
  start_ = 0;
}

void GpuBuffer::write(std::size_t offset, std::span<const std::byte> bytes) const {
  if (!upload(gpu_, address() + offset, bytes.data(), bytes.size())) throw std::runtime_error("a copy failed");
}

std::vector<std::byte> GpuBuffer::read(std::size_t offset, std::size_t length) const {
  std::vector<std::byte> bytes(length);
  if (!download(bytes.data(), gpu_, address() + offset, length)) throw std::runtime_error("a copy failed");
  return bytes;
}

void GpuBuffer::poison() const {
  const std::vector<std::byte> bytes(guard_ + size_ + guard_, GuardedBuffer::kPoison);
  write(-guard_, bytes);
}

std::string GpuBuffer::untouched_outside(std::size_t offset, std::size_t length) const {
  std::vector<std::byte> bytes = read(-guard_, guard_ + size_ + guard_);
  const auto first = bytes.begin() + static_cast<std::ptrdiff_t>(guard_ + offset);
  std::fill(first, first + static_cast<std::ptrdiff_t>(length), GuardedBuffer::kPoison);
  const auto changed =
      std::find_if(bytes.begin(), bytes.end(), [](std::byte byte) { return byte != GuardedBuffer::kPoison; });
  if (changed == bytes.end()) return {};
  return "the byte at " + std::to_string(changed - bytes.begin() - static_cast<std::ptrdiff_t>(guard_)) + " changed";
}

int dmabuf_of(std::uint64_t address, std::size_t bytes) {
  int fd = -1;
  require(export_dmabuf(address, bytes, fd), "cuMemGetHandleForAddressRange");
  return fd;
}

ibv_mr* reg_dmabuf(ibv_pd* pd, std::uint64_t address, std::size_t bytes, int access) {
  int exported = -1;
  // NVIDIA's driver exports no memory that it has imported; that needs SOFTVERBS_GPU_MEMORY=both.
  if (export_dmabuf(address, bytes, exported) != CUDA_SUCCESS) {
    return verbs().reg_mr(pd, reinterpret_cast<void*>(address), bytes, access);
  }
  const UniqueFd fd(exported);
  return verbs().reg_dmabuf_mr(pd, address % kCudaPageBytes, bytes, address, fd.get(), access);
}

PlacedRegion::PlacedRegion(ibv_pd* pd, const Place& place, std::size_t size, std::size_t misalign, int access)
    : place_(place), size_(size) {
  if (!place.is_gpu()) {
    host_.emplace(size, misalign);
  } else {
    gpu_.emplace(place, size, misalign);
  }
  if (place.is_gpu() && place.registration == Registration::kDmabuf) {
    mr.reset(reg_dmabuf(pd, address(), size, access));
    if (!mr) throw std::runtime_error(std::string("ibv_reg_dmabuf_mr: ") + std::strerror(errno));
  } else {
    mr = reg_mr(pd, reinterpret_cast<void*>(address()), size, access);
  }
}

std::uint64_t PlacedRegion::address(std::size_t offset) const {
  return (host_ ? host_->address() : gpu_->address()) + offset;
}

ibv_sge PlacedRegion::sge(std::size_t offset, std::size_t length) const {
  return {address(offset), static_cast<std::uint32_t>(length), mr->lkey};
}

SendOptions PlacedRegion::target(std::uint64_t wr_id, std::size_t offset) const {
  return {.wr_id = wr_id, .remote_addr = address(offset), .rkey = mr->rkey};
}

void PlacedRegion::write(std::size_t offset, std::span<const std::byte> bytes) const {
  host_ ? static_cast<void>(std::copy(bytes.begin(), bytes.end(), host_->data() + offset)) : gpu_->write(offset, bytes);
}

std::vector<std::byte> PlacedRegion::read(std::size_t offset, std::size_t length) const {
  if (!host_) return gpu_->read(offset, length);
  return {host_->data() + offset, host_->data() + offset + length};
}

std::uint64_t PlacedRegion::read_word(std::size_t offset) const {
  std::uint64_t word = 0;
  std::memcpy(&word, read(offset, sizeof word).data(), sizeof word);
  return word;
}

void PlacedRegion::write_word(std::size_t offset, std::uint64_t word) const {
  write(offset, std::as_bytes(std::span(&word, 1)));
}

void PlacedRegion::fill(std::size_t offset, std::size_t length, std::uint64_t seed) const {
  std::vector<std::byte> bytes(length);
  fill_pattern(bytes, seed);
  write(offset, bytes);
}

std::optional<std::size_t> PlacedRegion::find_wrong_byte(std::size_t offset, std::size_t length,
                                                         std::uint64_t seed) const {
  return verbatim::test::find_wrong_byte(read(offset, length), seed);
}

void PlacedRegion::poison() const {
  host_ ? host_->poison() : gpu_->poison();
}

std::string PlacedRegion::untouched_outside(std::size_t offset, std::size_t length) const {
  return host_ ? host_->untouched_outside(offset, length) : gpu_->untouched_outside(offset, length);
}

void PlacedRegion::release() {
  mr.reset();
  if (gpu_) gpu_->free();
}

}  // namespace verbatim::test
