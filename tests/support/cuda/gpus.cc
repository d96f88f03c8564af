#include "support/cuda/gpus.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace verbatim::test {
namespace {

constexpr std::size_t kBounceBytes = 1 << 20;

// What this process has of CUDA. Never destroyed.
struct Gpus {
  struct Gpu {
    CUcontext context = nullptr;
    CUstream stream = nullptr;
  };

  Gpus() : cuda(path()) {
    require(cuda.cuInit(0), "cuInit");
    int count = 0;
    require(cuda.cuDeviceGetCount(&count), "cuDeviceGetCount");
    for (int i = 0; i < count; ++i) {
      Gpu gpu;
      require(cuda.cuDevicePrimaryCtxRetain(&gpu.context, i), "cuDevicePrimaryCtxRetain");
      require(cuda.cuCtxSetCurrent(gpu.context), "cuCtxSetCurrent");
      require(cuda.cuStreamCreate(&gpu.stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
      gpus.push_back(gpu);
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
  std::byte* bounce = nullptr;  // pinned
};

Gpus& gpus() {
  static Gpus& instance = *new Gpus;
  return instance;
}

// Calls copy(done, bytes, bounce buffer, stream) for each part. It queues the copy of a part and waits for its end.
template <typename Copy>
bool copy_by_parts(unsigned gpu, std::size_t bytes, Copy copy) {
  Gpus& all = gpus();
  const std::lock_guard lock(all.bounce_mutex);
  use_gpu(gpu);
  all.set_delay(0);
  bool is_copied = true;
  for (std::size_t done = 0; done < bytes && is_copied; done += kBounceBytes) {
    is_copied = copy(done, std::min(bytes - done, kBounceBytes), all.bounce, all.gpus.at(gpu).stream);
  }
  all.set_delay(all.delay_us);
  return is_copied;
}

bool has_ended(CUresult queued, CUstream stream) {
  return queued == CUDA_SUCCESS && cuda().cuStreamSynchronize(stream) == CUDA_SUCCESS;
}

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace

void require(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS) throw std::runtime_error(std::string(call) + " failed: " + std::to_string(result));
}

const Cuda& cuda() {
  return gpus().cuda;
}

unsigned gpu_count() {
  return static_cast<unsigned>(gpus().gpus.size());
}

CUresult try_use_gpu(unsigned gpu) {
  return cuda().cuCtxSetCurrent(gpus().gpus.at(gpu).context);
}

void use_gpu(unsigned gpu) {
  require(try_use_gpu(gpu), "cuCtxSetCurrent");
}

bool is_gpu_usable(unsigned gpu) {
  use_gpu(gpu);
  return cuda().cuStreamQuery(gpus().gpus.at(gpu).stream) == CUDA_SUCCESS;
}

void set_copy_delay_us(unsigned mean) {
  Gpus& all = gpus();
  const std::lock_guard lock(all.bounce_mutex);
  all.delay_us = mean;
  all.set_delay(mean);
}

bool upload(unsigned gpu, std::uint64_t address, const void* from, std::size_t bytes) {
  return copy_by_parts(gpu, bytes, [&](std::size_t done, std::size_t part, std::byte* bounce, CUstream stream) {
    std::memcpy(bounce, static_cast<const std::byte*>(from) + done, part);
    return has_ended(cuda().cuMemcpyHtoDAsync_v2(address + done, bounce, part, stream), stream);
  });
}

bool download(void* to, unsigned gpu, std::uint64_t address, std::size_t bytes) {
  return copy_by_parts(gpu, bytes, [&](std::size_t done, std::size_t part, std::byte* bounce, CUstream stream) {
    if (!has_ended(cuda().cuMemcpyDtoHAsync_v2(bounce, address + done, part, stream), stream)) return false;
    std::memcpy(static_cast<std::byte*>(to) + done, bounce, part);
    return true;
  });
}

MappedMemory map_memory(unsigned gpu, std::size_t bytes, bool is_exportable, std::size_t handles) {
  use_gpu(gpu);
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, static_cast<int>(gpu)};
  properties.requestedHandleTypes = is_exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  properties.allocFlags.gpuDirectRDMACapable = 1;
  std::size_t unit = 0;
  require(cuda().cuMemGetAllocationGranularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
          "cuMemGetAllocationGranularity");
  const std::size_t handle_bytes = round_up(bytes, unit);
  CUdeviceptr start = 0;
  require(cuda().cuMemAddressReserve(&start, handles * handle_bytes, 0, 0, 0), "cuMemAddressReserve");
  for (std::size_t i = 0; i < handles; ++i) {
    CUmemGenericAllocationHandle handle = 0;
    require(cuda().cuMemCreate(&handle, handle_bytes, &properties, 0), "cuMemCreate");
    require(cuda().cuMemMap(start + i * handle_bytes, handle_bytes, 0, handle, 0), "cuMemMap");
    require(cuda().cuMemRelease(handle), "cuMemRelease");
  }
  const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  require(cuda().cuMemSetAccess(start, handles * handle_bytes, &access, 1), "cuMemSetAccess");
  return {start, handles * handle_bytes, handle_bytes};
}

void unmap(const MappedMemory& memory) {
  cuda().cuMemUnmap(memory.start, memory.bytes);
  cuda().cuMemAddressFree(memory.start, memory.bytes);
}

CUresult export_dmabuf(std::uint64_t address, std::size_t bytes, int& fd) {
  const std::uint64_t first = page_of(address);
  return cuda().cuMemGetHandleForAddressRange(&fd, first, round_up(address + bytes, kCudaPageBytes) - first,
                                              CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
}

}  // namespace verbatim::test
