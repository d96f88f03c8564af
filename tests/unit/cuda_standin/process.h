// A process that uses the driver. Each test runs in a forked child, because the driver reads its settings once and does
// not survive fork. Tests named Driver* use nothing that only the stand-in has: they also run on NVIDIA's libcuda with
//   STANDIN_CUDA_LIBRARY=libcuda.so.1 standin_cuda_test --gtest_filter='Driver*'
#pragma once

#include <gtest/gtest.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <functional>
#include <span>
#include <thread>
#include <vector>

#include "support/child.h"
#include "support/cuda/standin_cuda.h"

namespace verbatim::test {

#define EXPECT_CUDA(call) EXPECT_EQ(call, CUDA_SUCCESS) << #call
#define REQUIRE_CUDA(call)                                  \
  if (const CUresult result = call; result != CUDA_SUCCESS) \
  throw std::runtime_error(#call " failed with " + std::to_string(result))

// The primary context of GPU 0 is current.
struct CudaProcess : Cuda {
  CudaProcess() : Cuda(std::getenv("STANDIN_CUDA_LIBRARY")) {
    REQUIRE_CUDA(cuInit(0));
    context = use_device(0);
  }

  CUcontext use_device(int device) const {
    CUcontext primary = nullptr;
    REQUIRE_CUDA(cuDevicePrimaryCtxRetain(&primary, device));
    REQUIRE_CUDA(cuCtxSetCurrent(primary));
    return primary;
  }
  bool has_peer() const {
    int count = 0;
    int can_access = 0;
    return cuDeviceGetCount(&count) == CUDA_SUCCESS && count > 1 &&
           cuDeviceCanAccessPeer(&can_access, 0, 1) == CUDA_SUCCESS && can_access == 1;
  }
  CUdeviceptr allocate(std::size_t bytes) const {
    CUdeviceptr address = 0;
    REQUIRE_CUDA(cuMemAlloc_v2(&address, bytes));
    return address;
  }
  std::span<unsigned char> allocate_host(std::size_t bytes) const {
    void* memory = nullptr;
    REQUIRE_CUDA(cuMemHostAlloc(&memory, bytes, 0));
    return {static_cast<unsigned char*>(memory), bytes};
  }
  CUstream make_stream(unsigned flags = CU_STREAM_NON_BLOCKING) const {
    CUstream stream = nullptr;
    REQUIRE_CUDA(cuStreamCreate(&stream, flags));
    return stream;
  }
  CUevent make_event() const {
    CUevent event = nullptr;
    REQUIRE_CUDA(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    return event;
  }
  void upload(CUdeviceptr to, const std::vector<unsigned char>& data) const {
    REQUIRE_CUDA(cuMemcpyHtoD_v2(to, data.data(), data.size()));
  }
  std::vector<unsigned char> download(CUdeviceptr from, std::size_t bytes) const {
    std::vector<unsigned char> data(bytes);
    REQUIRE_CUDA(cuMemcpyDtoH_v2(data.data(), from, bytes));
    return data;
  }
  template <typename Value>
  Value attribute(CUpointer_attribute which, CUdeviceptr address) const {
    Value value{};
    REQUIRE_CUDA(cuPointerGetAttribute(&value, which, address));
    return value;
  }
  unsigned long long buffer_id(CUdeviceptr address) const {
    return attribute<unsigned long long>(CU_POINTER_ATTRIBUTE_BUFFER_ID, address);
  }

  CUcontext context = nullptr;
};

// Runs `body` in a child with its own driver.
inline void in_process(const Variables& variables, const std::function<void(CudaProcess&)>& body) {
  check_in_child(variables, [&] {
    CudaProcess cuda;
    body(cuda);
  });
}

inline std::vector<unsigned char> numbered(std::size_t bytes, unsigned char first) {
  std::vector<unsigned char> data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<unsigned char>(first + i % 251);
  return data;
}

}  // namespace verbatim::test
