// The part of CUDA's driver interface that the tools use, with host memory in place of GPU memory. With it the NCCL
// mode of the tools can run without a GPU. Every operation of a stream is complete when its call returns.
#include <cstdlib>
#include <cstring>

extern "C" {

using CUresult = int;
using CUdeviceptr = unsigned long long;

constexpr std::size_t kMemoryBytes = std::size_t{1} << 33;
static std::size_t allocated_bytes;

static void* memory_at(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);
}

CUresult cuInit(unsigned) {
  return 0;
}
// HOST_CUDA_GPUS: the number of GPUs, 1 when it is not set.
CUresult cuDeviceGetCount(int* count) {
  const char* const gpus = std::getenv("HOST_CUDA_GPUS");
  *count = gpus == nullptr ? 1 : std::atoi(gpus);
  return 0;
}
CUresult cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
CUresult cuDeviceGetName(char* name, int bytes, int) {
  std::strncpy(name, "host", static_cast<std::size_t>(bytes));
  return 0;
}
CUresult cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &allocated_bytes;
  return 0;
}
CUresult cuDevicePrimaryCtxRelease(int) {
  return 0;
}
CUresult cuCtxSetCurrent(void*) {
  return 0;
}
CUresult cuMemAlloc_v2(CUdeviceptr* data, std::size_t bytes) {
  allocated_bytes += bytes;
  *data = reinterpret_cast<CUdeviceptr>(std::malloc(bytes));
  return *data == 0 ? 2 : 0;
}
CUresult cuMemFree_v2(CUdeviceptr data) {
  std::free(memory_at(data));
  return 0;
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, void*) {
  std::memmove(memory_at(to), memory_at(from), bytes);
  return 0;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, std::size_t bytes, void*) {
  std::memcpy(memory_at(to), from, bytes);
  return 0;
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, std::size_t bytes, void*) {
  std::memcpy(to, memory_at(from), bytes);
  return 0;
}
CUresult cuStreamCreate(void** stream, unsigned) {
  *stream = &allocated_bytes;
  return 0;
}
CUresult cuStreamDestroy_v2(void*) {
  return 0;
}
CUresult cuStreamSynchronize(void*) {
  return 0;
}
CUresult cuStreamQuery(void*) {
  return 0;
}
CUresult cuMemGetInfo_v2(std::size_t* available, std::size_t* total) {
  *total = kMemoryBytes;
  *available = kMemoryBytes - allocated_bytes;
  return 0;
}
CUresult cuGetErrorName(CUresult, const char** name) {
  *name = "an error";
  return 0;
}
}
