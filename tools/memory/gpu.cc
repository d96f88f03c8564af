#include "memory/gpu.h"

namespace verbatim::memory {
namespace {

constexpr int kCudaSuccess = 0;
constexpr int kNotReady = 600;
constexpr unsigned kNonBlocking = 1;
constexpr int kDmaBufSupported = 124;  // CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
constexpr int kDmaBufFd = 1;           // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

unsigned long long address(const void* data) {
  return reinterpret_cast<unsigned long long>(data);
}

}  // namespace

Gpu::Functions::Functions(const std::string& library) : from(library) {
  from.find("cuInit", init);
  from.find("cuDeviceGetCount", count);
  from.find("cuDeviceGet", get);
  from.find("cuDeviceGetName", get_name);
  from.find("cuDevicePrimaryCtxRetain", retain);
  from.find("cuDevicePrimaryCtxRelease", release);
  from.find("cuCtxSetCurrent", set_current);
  from.find("cuMemAlloc_v2", allocate);
  from.find("cuMemFree_v2", free);
  from.find("cuMemcpyDtoDAsync_v2", copy);
  from.find("cuMemcpyHtoDAsync_v2", upload);
  from.find("cuMemcpyDtoHAsync_v2", download);
  from.find("cuStreamCreate", create_stream);
  from.find("cuStreamDestroy_v2", destroy_stream);
  from.find("cuStreamSynchronize", synchronize);
  from.find("cuStreamQuery", query);
  from.find("cuMemGetInfo_v2", memory_info);
  from.find("cuGetErrorName", error_name);
  from.find_optional("cuDeviceGetAttribute", attribute);
  from.find_optional("cuMemGetHandleForAddressRange", export_range);
}

Gpu::Gpu(const std::string& library, int rank) : cuda_(library) {
  check(cuda_.init(0), "cuInit");
  int gpus = 0;
  check(cuda_.count(&gpus), "cuDeviceGetCount");
  if (gpus == 0) throw ranks::Failure("this machine has no GPU");
  check(cuda_.get(&device_, rank % gpus), "cuDeviceGet");
  char name[96] = {};
  check(cuda_.get_name(name, sizeof name - 1, device_), "cuDeviceGetName");
  name_ = "GPU " + std::to_string(rank % gpus) + " of " + std::to_string(gpus) + " (" + name + ")";
  // The primary context, which NCCL's CUDA runtime uses too.
  check(cuda_.retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  make_current();
}

void Gpu::make_current() const {
  check(cuda_.set_current(context_), "cuCtxSetCurrent");
}

Gpu::~Gpu() {
  cuda_.set_current(context_);
  for (const Stream stream : streams_) cuda_.destroy_stream(stream);
  for (const Pointer data : allocated_) cuda_.free(data);
  cuda_.release(device_);
}

std::size_t Gpu::in_use() const {
  make_current();
  std::size_t free = 0;
  std::size_t total = 0;
  check(cuda_.memory_info(&free, &total), "cuMemGetInfo");
  return total - free;
}

std::byte* Gpu::allocate(std::size_t bytes) {
  make_current();
  Pointer data = 0;
  check(cuda_.allocate(&data, bytes == 0 ? 1 : bytes), "cuMemAlloc");
  allocated_.push_back(data);
  return reinterpret_cast<std::byte*>(data);
}

Gpu::Stream Gpu::make_stream() {
  Stream stream = nullptr;
  check(cuda_.create_stream(&stream, kNonBlocking), "cuStreamCreate");
  streams_.push_back(stream);
  return stream;
}

bool Gpu::exports_dmabufs() const {
  int supported = 0;
  return cuda_.attribute != nullptr && cuda_.export_range != nullptr &&
         cuda_.attribute(&supported, kDmaBufSupported, device_) == kCudaSuccess && supported != 0;
}

UniqueFd Gpu::export_dmabuf(const std::byte* data, std::size_t bytes) const {
  make_current();
  int fd = -1;
  check(cuda_.export_range(&fd, address(data), bytes, kDmaBufFd, 0), "cuMemGetHandleForAddressRange");
  return UniqueFd(fd);
}

void Gpu::copy(std::byte* to, const std::byte* from, std::size_t bytes, Stream stream) {
  make_current();
  if (bytes > 0) check(cuda_.copy(address(to), address(from), bytes, stream), "cuMemcpyDtoDAsync");
}

void Gpu::upload(std::byte* to, const void* from, std::size_t bytes, Stream stream) {
  make_current();
  check(cuda_.upload(address(to), from, bytes, stream), "cuMemcpyHtoDAsync");
  synchronize(stream);
}

void Gpu::download(void* to, const std::byte* from, std::size_t bytes, Stream stream) {
  make_current();
  check(cuda_.download(to, address(from), bytes, stream), "cuMemcpyDtoHAsync");
  synchronize(stream);
}

void Gpu::synchronize(Stream stream) {
  make_current();
  check(cuda_.synchronize(stream), "cuStreamSynchronize");
}

bool Gpu::idle(Stream stream) const {
  const Result result = cuda_.query(stream);
  if (result == kNotReady) return false;
  check(result, "cuStreamQuery");
  return true;
}

void Gpu::check(Result result, const char* what) const {
  if (result == kCudaSuccess) return;
  const char* name = nullptr;
  cuda_.error_name(result, &name);
  throw ranks::Failure(std::string(what) + ": " + (name == nullptr ? "error " + std::to_string(result) : name));
}

}  // namespace verbatim::memory
