// What a program may ask about GPUs and errors.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "support/cuda/driver.h"

using standin::Call;
using standin::driver;

STANDIN_EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuDeviceGetCount(int* count) {
  const Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  *count = static_cast<int>(driver().devices.size());
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  const Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  if (!driver().is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  const Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  if (!driver().is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, static_cast<std::size_t>(std::max(bytes, 0)), "stand-in for a GPU");
  return CUDA_SUCCESS;
}

// The same in all processes, because GPU n is the same GPU in all of them.
STANDIN_EXPORT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  const Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  if (!driver().is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::memcpy(uuid->bytes, "stand-in GPU   0", sizeof uuid->bytes);
  uuid->bytes[15] = static_cast<char>('0' + device);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  const Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  if (!driver().is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = 0;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      *value = 0x40 + device;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS:
      *value = 1;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING:
      *value = 100;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      *value = 3;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = 9;
      return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

STANDIN_EXPORT CUresult cuDeviceCanAccessPeer(int* can_access, CUdevice device, CUdevice peer) {
  const Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  if (!driver().is_device(device) || !driver().is_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can_access = driver().can_access_peer(device, peer) ? 1 : 0;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = nullptr;
  switch (error) {
#define STANDIN_NAME(value) \
  case value:               \
    *name = #value;         \
    return CUDA_SUCCESS;
    STANDIN_NAME(CUDA_SUCCESS)
    STANDIN_NAME(CUDA_ERROR_INVALID_VALUE)
    STANDIN_NAME(CUDA_ERROR_OUT_OF_MEMORY)
    STANDIN_NAME(CUDA_ERROR_NOT_INITIALIZED)
    STANDIN_NAME(CUDA_ERROR_NO_DEVICE)
    STANDIN_NAME(CUDA_ERROR_INVALID_DEVICE)
    STANDIN_NAME(CUDA_ERROR_INVALID_CONTEXT)
    STANDIN_NAME(CUDA_ERROR_MAP_FAILED)
    STANDIN_NAME(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
    STANDIN_NAME(CUDA_ERROR_INVALID_HANDLE)
    STANDIN_NAME(CUDA_ERROR_NOT_FOUND)
    STANDIN_NAME(CUDA_ERROR_NOT_READY)
    STANDIN_NAME(CUDA_ERROR_ILLEGAL_ADDRESS)
    STANDIN_NAME(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
    STANDIN_NAME(CUDA_ERROR_CONTEXT_IS_DESTROYED)
    STANDIN_NAME(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
    STANDIN_NAME(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
    STANDIN_NAME(CUDA_ERROR_LAUNCH_FAILED)
    STANDIN_NAME(CUDA_ERROR_NOT_SUPPORTED)
#undef STANDIN_NAME
  }
  return CUDA_ERROR_INVALID_VALUE;
}

STANDIN_EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  return cuGetErrorName(error, text);
}
