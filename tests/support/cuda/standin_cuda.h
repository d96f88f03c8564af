// For tests of GPU memory: opens a libcuda, the stand-in or NVIDIA's, and declares the functions that only the stand-in
// has. The stand-in's settings are variables, read by cuInit:
//   STANDIN_CUDA_GPUS      number of GPUs, default 2
//   STANDIN_CUDA_PEER      0: no peer access between GPUs; default 1
//   STANDIN_CUDA_DELAY_US  mean time that a copy waits before it begins, default 30; each takes between 0 and twice
//   that
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "support/cuda/driver_api.h"

// A kernel that spins on this GPU until end_kernel. While any kernel runs, a call that may wait for kernels does so:
// allocation, free, pinning, import, export, mapping, the making of streams, events and contexts, cuCtxSynchronize,
// memset (a kernel of the driver), and pageable copies. So do operations on streams that are not non-blocking.
extern "C" void standin_cuda_begin_kernel(int device);
extern "C" void standin_cuda_end_kernel(int device);
// Number of calls and operations that have waited for a kernel.
extern "C" unsigned long long standin_cuda_waits();
// Number of copies and memsets that have begun.
extern "C" unsigned long long standin_cuda_copies();
// Number of those that the driver stages: host memory that is not pinned, or memory of another GPU without peer access.
extern "C" unsigned long long standin_cuda_pageable_copies();
// Number of streams in which a copy or memset was queued, of those that exist; the null stream is none of them.
extern "C" unsigned long long standin_cuda_copy_streams();
// The n-th copy or memset from now (1: the next) fails with this error, which stays the error of its context.
extern "C" void standin_cuda_fail_copy(unsigned n, CUresult error);
// The primary context of this GPU goes away as with cuDevicePrimaryCtxReset: its operations never end, its memory is
// freed.
extern "C" void standin_cuda_kill_context(int device);
// Replaces STANDIN_CUDA_DELAY_US, for copies that are queued from now on.
extern "C" void standin_cuda_set_delay_us(unsigned mean);

// All functions of driver_api.h. clang-format finds no fixed form for such a list.
// clang-format off
#define VERBATIM_CUDA_CALLS(X) \
  X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString) X(cuDeviceGetCount) X(cuDeviceGet) \
  X(cuDeviceGetName) X(cuDeviceGetUuid) X(cuDeviceGetAttribute) X(cuDeviceCanAccessPeer) X(cuDevicePrimaryCtxRetain) \
  X(cuDevicePrimaryCtxRelease) X(cuDevicePrimaryCtxGetState) X(cuCtxSetCurrent) X(cuCtxGetCurrent) \
  X(cuCtxPushCurrent_v2) X(cuCtxPopCurrent_v2) X(cuCtxEnablePeerAccess) X(cuCtxSynchronize) X(cuMemAlloc_v2) \
  X(cuMemFree_v2) X(cuMemGetInfo_v2) X(cuMemGetAddressRange_v2) X(cuPointerGetAttribute) X(cuMemHostAlloc) \
  X(cuMemFreeHost) X(cuMemHostRegister_v2) X(cuMemHostUnregister) X(cuStreamCreate) X(cuStreamDestroy_v2) \
  X(cuStreamQuery) X(cuStreamSynchronize) X(cuEventCreate) X(cuEventDestroy_v2) X(cuEventRecord) X(cuEventQuery) \
  X(cuMemcpyHtoDAsync_v2) X(cuMemcpyDtoHAsync_v2) X(cuMemcpyDtoDAsync_v2) X(cuMemcpyHtoD_v2) X(cuMemcpyDtoH_v2) \
  X(cuMemsetD8Async) X(cuIpcGetMemHandle) X(cuIpcOpenMemHandle_v2) X(cuIpcCloseMemHandle) \
  X(cuMemGetAllocationGranularity) X(cuMemCreate) X(cuMemRelease) X(cuMemAddressReserve) X(cuMemAddressFree) \
  X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess) X(cuMemRetainAllocationHandle) X(cuMemExportToShareableHandle) \
  X(cuMemImportFromShareableHandle) X(cuMemGetHandleForAddressRange)
// What only the stand-in has.
#define VERBATIM_STANDIN_CUDA_CALLS(X) \
  X(standin_cuda_begin_kernel) X(standin_cuda_end_kernel) X(standin_cuda_waits) X(standin_cuda_copies) \
  X(standin_cuda_pageable_copies) X(standin_cuda_copy_streams) X(standin_cuda_fail_copy) \
  X(standin_cuda_kill_context) X(standin_cuda_set_delay_us)
// clang-format on

namespace verbatim::test {

// The library stays in the process: the driver's threads cannot be unloaded.
struct Cuda {
  explicit Cuda(const std::string& path = "libcuda.so.1") {
    void* const library = dlopen(path.c_str(), RTLD_NOW);
    if (library == nullptr) throw std::runtime_error(dlerror());
#define VERBATIM_FIND(name) name = reinterpret_cast<decltype(name)>(dlsym(library, #name));
    VERBATIM_CUDA_CALLS(VERBATIM_FIND)
    VERBATIM_STANDIN_CUDA_CALLS(VERBATIM_FIND)
#undef VERBATIM_FIND
  }

  bool is_standin() const {
    return standin_cuda_copies != nullptr;
  }

#define VERBATIM_POINTER(name) decltype(&::name) name = nullptr;
  VERBATIM_CUDA_CALLS(VERBATIM_POINTER)
  VERBATIM_STANDIN_CUDA_CALLS(VERBATIM_POINTER)
#undef VERBATIM_POINTER
};

}  // namespace verbatim::test
