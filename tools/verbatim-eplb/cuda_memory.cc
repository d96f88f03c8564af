#include "verbatim-eplb/cuda_memory.h"

namespace verbatim::eplb {
namespace {

constexpr int kSuccess = 0;
constexpr int kNotReady = 600;
constexpr unsigned kNonBlocking = 1;

unsigned long long address(const void* data) {
  return reinterpret_cast<unsigned long long>(data);
}

}  // namespace

CudaMemory::Functions::Functions(const std::string& library) : from(library) {
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
  from.find("cuStreamSynchronize", synchronize);
  from.find("cuStreamQuery", query);
  from.find("cuMemGetInfo_v2", memory_info);
  from.find("cuGetErrorName", error_name);
}

CudaMemory::CudaMemory(const std::string& library, int rank) : cuda_(library) {
  check(cuda_.init(0), "cuInit");
  int gpus = 0;
  check(cuda_.count(&gpus), "cuDeviceGetCount");
  if (gpus == 0) throw ranks::Failure("missing here: a GPU");
  check(cuda_.get(&device_, rank % gpus), "cuDeviceGet");
  char name[96] = {};
  check(cuda_.get_name(name, sizeof name - 1, device_), "cuDeviceGetName");
  name_ = "GPU " + std::to_string(rank % gpus) + " of " + std::to_string(gpus) + " (" + name + ")";
  // The primary context is the one that NCCL finds through the CUDA runtime.
  check(cuda_.retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  check(cuda_.set_current(context_), "cuCtxSetCurrent");
  check(cuda_.create_stream(&stream_, kNonBlocking), "cuStreamCreate");
}

CudaMemory::~CudaMemory() {
  for (const Pointer data : taken_) cuda_.free(data);
  if (context_ != nullptr) cuda_.release(device_);
}

std::byte* CudaMemory::take(std::size_t bytes) {
  Pointer data = 0;
  check(cuda_.allocate(&data, bytes == 0 ? 1 : bytes), "cuMemAlloc");
  taken_.push_back(data);
  return reinterpret_cast<std::byte*>(data);
}

void CudaMemory::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0) check(cuda_.copy(address(to), address(from), bytes, stream_), "cuMemcpyDtoDAsync");
}

void CudaMemory::upload(std::byte* to, const void* from, std::size_t bytes) {
  check(cuda_.upload(address(to), from, bytes, stream_), "cuMemcpyHtoDAsync");
  finish();
}

void CudaMemory::download(void* to, const std::byte* from, std::size_t bytes) {
  check(cuda_.download(to, address(from), bytes, stream_), "cuMemcpyDtoHAsync");
  finish();
}

void CudaMemory::finish() {
  check(cuda_.synchronize(stream_), "cuStreamSynchronize");
}

bool CudaMemory::idle() const {
  const Result result = cuda_.query(stream_);
  if (result == kNotReady) return false;
  check(result, "cuStreamQuery");
  return true;
}

std::size_t CudaMemory::in_use() const {
  std::size_t free = 0;
  std::size_t total = 0;
  check(cuda_.memory_info(&free, &total), "cuMemGetInfo");
  return total - free;
}

void CudaMemory::check(Result result, const char* what) const {
  if (result == kSuccess) return;
  const char* name = nullptr;
  cuda_.error_name(result, &name);
  throw ranks::Failure(std::string(what) + ": " + (name == nullptr ? "error " + std::to_string(result) : name));
}

}  // namespace verbatim::eplb
