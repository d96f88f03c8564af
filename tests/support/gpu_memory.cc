#include "support/gpu_memory.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "base/unique_fd.h"
#include "support/cuda/standin_cuda.h"

namespace verbatim::test {
namespace {

constexpr std::size_t kCudaPageBytes = 4096;
constexpr std::size_t kBounceBytes = 1 << 20;

void require(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS) throw std::runtime_error(std::string(call) + " failed: " + std::to_string(result));
}

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

// What this process has of CUDA. A process without GPU memory never opens libcuda.
struct Gpus {
  struct Gpu {
    CUcontext context = nullptr;
    CUstream stream = nullptr;
  };

  Gpus() : cuda(path()) {
    require(cuda.cuInit(0), "cuInit");
    int count = 0;
    require(cuda.cuDeviceGetCount(&count), "cuDeviceGetCount");
    gpus.resize(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) {
      Gpu& gpu = gpus[static_cast<std::size_t>(i)];
      require(cuda.cuDevicePrimaryCtxRetain(&gpu.context, i), "cuDevicePrimaryCtxRetain");
      require(cuda.cuCtxSetCurrent(gpu.context), "cuCtxSetCurrent");
      require(cuda.cuStreamCreate(&gpu.stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    }
    constexpr unsigned kPortable = 1;
    void* memory = nullptr;
    require(cuda.cuMemHostAlloc(&memory, kBounceBytes, kPortable), "cuMemHostAlloc");
    bounce = static_cast<std::byte*>(memory);
    set_delay(delay_us);
  }

  void set_delay(unsigned mean_us) const {
    if (cuda.is_standin()) cuda.standin_cuda_set_delay_us(mean_us);
  }

  static const char* path() {
    const char* const path = std::getenv("CUDA_TEST_LIBRARY");
    if (path == nullptr) throw std::runtime_error("CUDA_TEST_LIBRARY does not name the libcuda to test with");
    return path;
  }

  Cuda cuda;
  std::vector<Gpu> gpus;
  std::mutex bounce_mutex;
  std::atomic<unsigned> delay_us = kUsualDelayUs;
  std::byte* bounce = nullptr;
};

Gpus& gpus() {
  static Gpus& instance = *new Gpus;
  return instance;
}

// Calls copy(address, bounce buffer, done, bytes, stream) for each part.
template <typename Prepare, typename Copy, typename Finish>
void copy_by_parts(unsigned gpu, std::size_t bytes, Prepare prepare, Copy copy, Finish finish) {
  Gpus& all = gpus();
  const std::lock_guard lock(all.bounce_mutex);
  use_gpu(gpu);
  const CUstream stream = all.gpus[gpu].stream;
  all.set_delay(0);
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t part = std::min(bytes - done, kBounceBytes);
    prepare(done, part);
    require(copy(done, part, stream), "a copy");
    require(all.cuda.cuStreamSynchronize(stream), "cuStreamSynchronize");
    finish(done, part);
    done += part;
  }
  all.set_delay(all.delay_us);
}

}  // namespace

const Cuda& cuda() {
  return gpus().cuda;
}

unsigned gpu_count() {
  return static_cast<unsigned>(gpus().gpus.size());
}

void use_gpu(unsigned gpu) {
  require(cuda().cuCtxSetCurrent(gpus().gpus[gpu].context), "cuCtxSetCurrent");
}

bool is_gpu_usable(unsigned gpu) {
  use_gpu(gpu);
  return cuda().cuStreamQuery(gpus().gpus[gpu].stream) == CUDA_SUCCESS;
}

void set_copy_delay_us(unsigned mean) {
  Gpus& all = gpus();
  const std::lock_guard lock(all.bounce_mutex);
  all.delay_us = mean;
  all.set_delay(mean);
}

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
    map(kind_, bytes);
  }
  poison();
}

void GpuBuffer::map(MemoryKind kind, std::size_t bytes) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, static_cast<int>(gpu_)};
  properties.requestedHandleTypes =
      kind == MemoryKind::kPrivate ? CU_MEM_HANDLE_TYPE_NONE : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.allocFlags.gpuDirectRDMACapable = 1;
  std::size_t unit = 0;
  require(cuda().cuMemGetAllocationGranularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
          "cuMemGetAllocationGranularity");
  const std::size_t handles = kind == MemoryKind::kJoined ? 2 : 1;
  const std::size_t handle_bytes = round_up(bytes, unit);
  mapped_bytes_ = handles * handle_bytes;
  CUdeviceptr address = 0;
  require(cuda().cuMemAddressReserve(&address, mapped_bytes_, 0, 0, 0), "cuMemAddressReserve");
  start_ = address;
  for (std::size_t i = 0; i < handles; ++i) {
    CUmemGenericAllocationHandle handle = 0;
    require(cuda().cuMemCreate(&handle, handle_bytes, &properties, 0), "cuMemCreate");
    require(cuda().cuMemMap(address + i * handle_bytes, handle_bytes, 0, handle, 0), "cuMemMap");
    require(cuda().cuMemRelease(handle), "cuMemRelease");
  }
  const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  require(cuda().cuMemSetAccess(address, mapped_bytes_, &access, 1), "cuMemSetAccess");
  if (kind == MemoryKind::kJoined) offset_ = handle_bytes - size_ / 2;
}

GpuBuffer::~GpuBuffer() {
  free();
}

void GpuBuffer::free() {
  if (start_ == 0) return;
  // The context may be gone, and then the memory is too.
  cuda().cuCtxSetCurrent(gpus().gpus[gpu_].context);
  if (kind_ == MemoryKind::kImported) {
    cuda().cuIpcCloseMemHandle(start_);
  } else if (kind_ == MemoryKind::kLegacy) {
    cuda().cuMemFree_v2(start_);
  } else {
    cuda().cuMemUnmap(start_, mapped_bytes_);
    cuda().cuMemAddressFree(start_, mapped_bytes_);
  }
  start_ = 0;
}

void GpuBuffer::write(std::size_t offset, std::span<const std::byte> bytes) const {
  std::byte* const bounce = gpus().bounce;
  copy_by_parts(
      gpu_, bytes.size(), [&](std::size_t done, std::size_t part) { std::memcpy(bounce, bytes.data() + done, part); },
      [&](std::size_t done, std::size_t part, CUstream stream) {
        return cuda().cuMemcpyHtoDAsync_v2(address() + offset + done, bounce, part, stream);
      },
      [](std::size_t, std::size_t) {});
}

std::vector<std::byte> GpuBuffer::read(std::size_t offset, std::size_t length) const {
  std::byte* const bounce = gpus().bounce;
  std::vector<std::byte> bytes(length);
  copy_by_parts(
      gpu_, length, [](std::size_t, std::size_t) {},
      [&](std::size_t done, std::size_t part, CUstream stream) {
        return cuda().cuMemcpyDtoHAsync_v2(bounce, address() + offset + done, part, stream);
      },
      [&](std::size_t done, std::size_t part) { std::memcpy(bytes.data() + done, bounce, part); });
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

namespace {

CUresult export_dmabuf(std::uint64_t address, std::size_t bytes, int& fd) {
  const std::uint64_t first = address / kCudaPageBytes * kCudaPageBytes;
  return cuda().cuMemGetHandleForAddressRange(&fd, first, round_up(address + bytes, kCudaPageBytes) - first,
                                              CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
}

}  // namespace

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
