#include "buffer.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace gpu_direct {
namespace {

constexpr std::size_t kBounceBytes = 1 << 20;
constexpr unsigned kLateUs = 30;

void require(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS) throw std::runtime_error(std::string(call) + " failed: " + std::to_string(result));
}

std::size_t guard_of(const Place& place) {
  return place.is_gpu() && place.kind != Kind::kSmall ? kPageBytes : 0;
}

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
    bounce = static_cast<unsigned char*>(memory);
  }

  static const char* path() {
    const char* const path = std::getenv("CUDA_TEST_LIBRARY");
    if (path == nullptr) throw std::runtime_error("CUDA_TEST_LIBRARY does not name the libcuda to test with");
    return path;
  }
  void set_delay(unsigned mean_us) const {
    if (cuda.is_standin()) cuda.standin_cuda_set_delay_us(mean_us);
  }

  verbatim::test::Cuda cuda;
  std::vector<Gpu> gpus;
  std::mutex mutex;
  unsigned char* bounce = nullptr;  // pinned
};

Gpus& gpus() {
  static Gpus& only = *new Gpus;
  return only;
}

// Copies between `host` and GPU memory through the bounce buffer. False: a copy failed.
bool copy(int gpu, bool to_gpu, CUdeviceptr address, unsigned char* host, std::size_t bytes) {
  Gpus& all = gpus();
  const std::lock_guard lock(all.mutex);
  use_gpu(gpu);
  const CUstream stream = all.gpus[static_cast<std::size_t>(gpu)].stream;
  bool copied = true;
  all.set_delay(0);
  for (std::size_t done = 0; done < bytes && copied;) {
    const std::size_t part = std::min(bytes - done, kBounceBytes);
    if (to_gpu) std::memcpy(all.bounce, host + done, part);
    const CUresult queued = to_gpu ? all.cuda.cuMemcpyHtoDAsync_v2(address + done, all.bounce, part, stream)
                                   : all.cuda.cuMemcpyDtoHAsync_v2(all.bounce, address + done, part, stream);
    copied = queued == CUDA_SUCCESS && all.cuda.cuStreamSynchronize(stream) == CUDA_SUCCESS;
    if (!to_gpu) std::memcpy(host + done, all.bounce, part);
    done += part;
  }
  all.set_delay(kLateUs);
  return copied;
}

}  // namespace

const verbatim::test::Cuda& cuda() {
  return gpus().cuda;
}

void use_gpu(int gpu) {
  require(cuda().cuCtxSetCurrent(gpus().gpus.at(static_cast<std::size_t>(gpu)).context), "cuCtxSetCurrent");
}

std::string name_of(const Place& place) {
  if (!place.is_gpu()) return "host memory";
  constexpr const char* kKinds[] = {"allocated", "small", "mapped", "private"};
  constexpr const char* kHows[] = {"by dma-buf", "by dma-buf at an offset", "plainly"};
  return std::string(kKinds[static_cast<std::size_t>(place.kind)]) + " memory of GPU " + std::to_string(place.gpu) +
         " registered " + kHows[static_cast<std::size_t>(place.how)];
}

Buffer::Buffer(const Place& place, std::size_t size, std::size_t offset)
    : place_(place),
      size_(size),
      before_(guard_of(place) + (place.is_gpu() ? offset : 0)),
      shadow_(place.is_gpu() ? before_ + size + guard_of(place) : size, place.is_gpu() ? 0 : offset) {
  if (!place.is_gpu()) return;
  use_gpu(place.gpu);
  if (place.kind == Kind::kAllocated || place.kind == Kind::kSmall) {
    require(cuda().cuMemAlloc_v2(&start_, shadow_.size()), "cuMemAlloc");
  } else {
    map();
  }
  upload(0, shadow_.size());
}

void Buffer::map() {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, place_.gpu};
  properties.requestedHandleTypes =
      place_.kind == Kind::kPrivate ? CU_MEM_HANDLE_TYPE_NONE : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.allocFlags.gpuDirectRDMACapable = 1;
  std::size_t unit = 0;
  require(cuda().cuMemGetAllocationGranularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
          "cuMemGetAllocationGranularity");
  mapped_bytes_ = (shadow_.size() + unit - 1) / unit * unit;
  CUmemGenericAllocationHandle handle = 0;
  require(cuda().cuMemAddressReserve(&start_, mapped_bytes_, 0, 0, 0), "cuMemAddressReserve");
  require(cuda().cuMemCreate(&handle, mapped_bytes_, &properties, 0), "cuMemCreate");
  require(cuda().cuMemMap(start_, mapped_bytes_, 0, handle, 0), "cuMemMap");
  require(cuda().cuMemRelease(handle), "cuMemRelease");
  const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  require(cuda().cuMemSetAccess(start_, mapped_bytes_, &access, 1), "cuMemSetAccess");
}

Buffer::~Buffer() {
  free();
}

void Buffer::free() {
  if (start_ == 0) return;
  use_gpu(place_.gpu);
  if (mapped_bytes_ == 0) {
    cuda().cuMemFree_v2(start_);
  } else {
    cuda().cuMemUnmap(start_, mapped_bytes_);
    cuda().cuMemAddressFree(start_, mapped_bytes_);
  }
  start_ = 0;
}

unsigned char* Buffer::data() {
  return place_.is_gpu() ? reinterpret_cast<unsigned char*>(start_ + before_) : shadow_.data();
}

void Buffer::write(std::size_t at, std::size_t size, std::uint64_t seed) {
  shadow_.write((place_.is_gpu() ? before_ : 0) + at, size, seed);
  if (place_.is_gpu()) upload(before_ + at, size);
}

void Buffer::expect(std::size_t at, std::size_t size, std::uint64_t seed) {
  shadow_.expect((place_.is_gpu() ? before_ : 0) + at, size, seed);
}

::testing::AssertionResult Buffer::intact() {
  if (place_.is_gpu() && !download()) return ::testing::AssertionFailure() << "the memory cannot be read";
  ::testing::AssertionResult result = shadow_.intact();
  if (!result) result << " in " << name_of(place_) << " with " << before_ << " bytes before it";
  return result;
}

void Buffer::upload(std::size_t from, std::size_t bytes) {
  if (!copy(place_.gpu, true, start_ + from, shadow_.data() + from, bytes)) throw std::runtime_error("upload failed");
}

bool Buffer::download() {
  return copy(place_.gpu, false, start_, shadow_.data(), shadow_.size());
}

int dmabuf_of(CUdeviceptr address, std::size_t bytes) {
  const CUdeviceptr first = page_of(address);
  const CUdeviceptr end = page_of(address + bytes + kPageBytes - 1);
  int fd = -1;
  const CUresult result =
      cuda().cuMemGetHandleForAddressRange(&fd, first, end - first, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
  EXPECT_EQ(result, CUDA_SUCCESS) << "cuMemGetHandleForAddressRange";
  return result == CUDA_SUCCESS ? fd : -1;
}

}  // namespace gpu_direct
