#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <fstream>
#include <string>
#include <thread>

#include "process.h"

using verbatim::test::Cuda;
using verbatim::test::CudaProcess;
using verbatim::test::in_process;

namespace {

TEST(DriverContexts, CallsWithoutACurrentContext_Fail) {
  in_process({}, [](CudaProcess& cuda) {
    const CUdeviceptr memory = cuda.allocate(100);
    const auto host = cuda.allocate_host(100);
    const CUstream stream = cuda.make_stream();
    const CUevent event = cuda.make_event();
    std::thread([&] {
      CUcontext current = cuda.context;
      EXPECT_CUDA(cuda.cuCtxGetCurrent(&current));
      EXPECT_EQ(current, nullptr) << "it belongs to the thread";
      CUdeviceptr address = 0;
      void* pinned = nullptr;
      CUstream other = nullptr;
      CUevent other_event = nullptr;
      EXPECT_EQ(cuda.cuMemAlloc_v2(&address, 100), CUDA_ERROR_INVALID_CONTEXT);
      EXPECT_EQ(cuda.cuMemHostAlloc(&pinned, 100, 0), CUDA_ERROR_INVALID_CONTEXT);
      EXPECT_EQ(cuda.cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_ERROR_INVALID_CONTEXT);
      EXPECT_EQ(cuda.cuEventCreate(&other_event, CU_EVENT_DISABLE_TIMING), CUDA_ERROR_INVALID_CONTEXT);
      EXPECT_EQ(cuda.cuMemcpyHtoDAsync_v2(memory, host.data(), 100, stream), CUDA_ERROR_INVALID_CONTEXT);
      EXPECT_EQ(cuda.cuCtxPopCurrent_v2(nullptr), CUDA_ERROR_INVALID_CONTEXT);
      unsigned type = 0;
      EXPECT_CUDA(cuda.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory));
      EXPECT_CUDA(cuda.cuEventQuery(event));
      EXPECT_CUDA(cuda.cuCtxPushCurrent_v2(cuda.context));
      EXPECT_CUDA(cuda.cuMemcpyHtoDAsync_v2(memory, host.data(), 100, stream));
      EXPECT_CUDA(cuda.cuStreamSynchronize(stream));
      EXPECT_CUDA(cuda.cuCtxPopCurrent_v2(&current));
      EXPECT_EQ(current, cuda.context);
      EXPECT_EQ(cuda.cuMemAlloc_v2(&address, 100), CUDA_ERROR_INVALID_CONTEXT);
    }).join();
  });
}

TEST(DriverContexts, PrimaryContext_IsOnePerDeviceAndCounted) {
  in_process({}, [](CudaProcess& cuda) {
    CUcontext again = nullptr;
    unsigned flags = 0;
    int active = 0;
    EXPECT_CUDA(cuda.cuDevicePrimaryCtxRetain(&again, 0));
    EXPECT_EQ(again, cuda.context);
    EXPECT_CUDA(cuda.cuDevicePrimaryCtxRelease(0));
    EXPECT_CUDA(cuda.cuDevicePrimaryCtxGetState(0, &flags, &active));
    EXPECT_EQ(active, 1);
    EXPECT_CUDA(cuda.cuDevicePrimaryCtxRelease(0));
    EXPECT_CUDA(cuda.cuDevicePrimaryCtxGetState(0, &flags, &active));
    EXPECT_EQ(active, 0);
  });
}

TEST(DriverContexts, WithoutInit_CallsFail) {
  verbatim::test::check_in_child({}, [] {
    const Cuda cuda(std::getenv("STANDIN_CUDA_LIBRARY"));
    int count = 0;
    EXPECT_EQ(cuda.cuDeviceGetCount(&count), CUDA_ERROR_NOT_INITIALIZED);
    CUdeviceptr address = 0;
    EXPECT_EQ(cuda.cuMemAlloc_v2(&address, 100), CUDA_ERROR_NOT_INITIALIZED);
  });
}

TEST(DriverContexts, ForkWithoutExec_LeavesTheChildWithoutADriver) {
  in_process({}, [](CudaProcess& cuda) {
    const CUdeviceptr memory = cuda.allocate(100);
    const pid_t child = fork();
    if (child == 0) {
      CUdeviceptr address = 0;
      std::vector<unsigned char> host(100);
      const bool fails = cuda.cuMemAlloc_v2(&address, 100) == CUDA_ERROR_NOT_INITIALIZED &&
                         cuda.cuMemcpyDtoH_v2(host.data(), memory, 100) == CUDA_ERROR_NOT_INITIALIZED;
      _exit(fails ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    cuda.upload(memory, std::vector<unsigned char>(100, 1));
  });
}

// softverbs uses a libcuda only if the process has loaded one.
TEST(StandinContexts, LibraryThatIsLoadedByItsPath_IsFoundByItsName) {
  in_process({}, [](CudaProcess&) {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    ASSERT_NE(library, nullptr);
    EXPECT_NE(dlsym(library, "standin_cuda_copies"), nullptr);
  });
}

TEST(StandinContexts, NumberOfGpus_IsASetting) {
  in_process({{"STANDIN_CUDA_GPUS", "3"}}, [](CudaProcess& cuda) {
    int count = 0;
    EXPECT_CUDA(cuda.cuDeviceGetCount(&count));
    EXPECT_EQ(count, 3);
    CUcontext context = nullptr;
    EXPECT_EQ(cuda.cuDevicePrimaryCtxRetain(&context, 3), CUDA_ERROR_INVALID_DEVICE);
  });
  verbatim::test::check_in_child({{"STANDIN_CUDA_GPUS", "0"}}, [] {
    const Cuda cuda(std::getenv("STANDIN_CUDA_LIBRARY"));
    EXPECT_EQ(cuda.cuInit(0), CUDA_ERROR_NO_DEVICE);
  });
}

TEST(StandinContexts, FailedCopy_IsTheErrorOfItsContext) {
  in_process({}, [](CudaProcess& cuda) {
    const CUdeviceptr memory = cuda.allocate(100);
    const auto host = cuda.allocate_host(100);
    const CUstream stream = cuda.make_stream();
    const CUevent event = cuda.make_event();
    cuda.standin_cuda_fail_copy(2, CUDA_ERROR_LAUNCH_FAILED);
    EXPECT_CUDA(cuda.cuMemcpyHtoDAsync_v2(memory, host.data(), 100, stream));
    EXPECT_CUDA(cuda.cuStreamSynchronize(stream));
    EXPECT_CUDA(cuda.cuMemcpyHtoDAsync_v2(memory, host.data(), 100, stream));
    EXPECT_EQ(cuda.cuStreamSynchronize(stream), CUDA_ERROR_LAUNCH_FAILED);
    EXPECT_EQ(cuda.cuMemcpyHtoDAsync_v2(memory, host.data(), 100, stream), CUDA_ERROR_LAUNCH_FAILED);
    EXPECT_EQ(cuda.cuEventRecord(event, stream), CUDA_ERROR_LAUNCH_FAILED);
    EXPECT_EQ(cuda.cuEventQuery(event), CUDA_ERROR_LAUNCH_FAILED);
    EXPECT_EQ(cuda.cuMemFree_v2(memory), CUDA_ERROR_LAUNCH_FAILED);
    cuda.use_device(1);
    cuda.allocate(100);
  });
}

TEST(StandinContexts, ContextThatGoesAway_TakesItsMemoryAlong) {
  in_process({{"STANDIN_CUDA_DELAY_US", "300000"}}, [](CudaProcess& cuda) {
    const CUdeviceptr memory = cuda.allocate(100);
    const auto host = cuda.allocate_host(100);
    const CUstream stream = cuda.make_stream();
    const CUevent event = cuda.make_event();
    for (int i = 0; i < 10; ++i) EXPECT_CUDA(cuda.cuMemcpyHtoDAsync_v2(memory, host.data(), 100, stream));
    EXPECT_CUDA(cuda.cuEventRecord(event, stream));
    cuda.standin_cuda_kill_context(0);
    EXPECT_EQ(cuda.cuEventQuery(event), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    EXPECT_EQ(cuda.cuMemcpyHtoDAsync_v2(memory, host.data(), 100, stream), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    EXPECT_EQ(cuda.cuCtxSetCurrent(cuda.context), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    unsigned type = 0;
    EXPECT_EQ(cuda.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory), CUDA_ERROR_INVALID_VALUE);
    EXPECT_NE(cuda.use_device(0), cuda.context) << "a new one";
    cuda.allocate(100);
  });
}

// What a data path may do beside NCCL's kernels, and what it may not.
TEST(StandinKernels, WhileOneSpins_OnlyPinnedCopiesOnNonBlockingStreamsGoOn) {
  in_process({}, [](CudaProcess& cuda) {
    const CUdeviceptr memory = cuda.allocate(1 << 20);
    const CUdeviceptr second = cuda.allocate(1 << 20);
    const auto host = cuda.allocate_host(1 << 20);
    std::vector<unsigned char> pageable(1 << 20);
    const CUstream stream = cuda.make_stream();
    const CUstream legacy = cuda.make_stream(CU_STREAM_DEFAULT);
    const CUevent event = cuda.make_event();
    const CUevent legacy_event = cuda.make_event();
    cuda.standin_cuda_begin_kernel(0);

    EXPECT_CUDA(cuda.cuMemcpyHtoDAsync_v2(memory, host.data(), host.size(), stream));
    EXPECT_CUDA(cuda.cuMemcpyDtoDAsync_v2(second, memory, host.size(), stream));
    EXPECT_CUDA(cuda.cuMemcpyDtoHAsync_v2(host.data(), second, host.size(), stream));
    EXPECT_CUDA(cuda.cuEventRecord(event, stream));
    while (cuda.cuEventQuery(event) == CUDA_ERROR_NOT_READY) std::this_thread::yield();
    EXPECT_CUDA(cuda.cuStreamSynchronize(stream));
    EXPECT_EQ(cuda.attribute<int>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory), 0);
    EXPECT_EQ(cuda.use_device(0), cuda.context);
    EXPECT_EQ(cuda.standin_cuda_waits(), 0U);
    EXPECT_CUDA(cuda.cuEventRecord(legacy_event, legacy));

    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    CUdeviceptr address = 0;
    CUdeviceptr reserved = 0;
    CUmemGenericAllocationHandle handle = 0;
    CUstream new_stream = nullptr;
    CUevent new_event = nullptr;
    CUcontext other = nullptr;
    void* pinned = nullptr;
    int descriptors[2] = {-1, -1};
    CUipcMemHandle ipc;
    const std::vector<std::pair<const char*, std::function<CUresult()>>> calls{
        {"alloc", [&] { return cuda.cuMemAlloc_v2(&address, 100); }},
        {"free", [&] { return cuda.cuMemFree_v2(0); }},
        {"host alloc", [&] { return cuda.cuMemHostAlloc(&pinned, 100, 0); }},
        {"register", [&] { return cuda.cuMemHostRegister_v2(pageable.data(), 8192, 0); }},
        {"stream", [&] { return cuda.cuStreamCreate(&new_stream, CU_STREAM_NON_BLOCKING); }},
        {"event", [&] { return cuda.cuEventCreate(&new_event, CU_EVENT_DISABLE_TIMING); }},
        {"context", [&] { return cuda.cuDevicePrimaryCtxRetain(&other, 1); }},
        {"synchronize", [&] { return cuda.cuCtxSynchronize(); }},
        {"memset", [&] { return cuda.cuMemsetD8Async(memory, 0, 100, stream); }},
        {"copy to", [&] { return cuda.cuMemcpyHtoD_v2(memory, host.data(), 100); }},
        {"copy from", [&] { return cuda.cuMemcpyDtoH_v2(host.data(), memory, 100); }},
        {"pageable", [&] { return cuda.cuMemcpyHtoDAsync_v2(memory, &pageable[100'000], 100, stream); }},
        {"null stream", [&] { return cuda.cuStreamSynchronize(legacy); }},
        {"create", [&] { return cuda.cuMemCreate(&handle, 2 << 20, &properties, 0); }},
        {"reserve", [&] { return cuda.cuMemAddressReserve(&reserved, 2 << 20, 0, 0, 0); }},
        {"ipc", [&] { return cuda.cuIpcGetMemHandle(&ipc, memory); }},
        {"dma-buf",
         [&] {
           return cuda.cuMemGetHandleForAddressRange(&descriptors[0], memory, 4096, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
                                                     0);
         }},
    };
    std::atomic<std::size_t> returned = 0;
    std::vector<std::thread> threads;
    for (const auto& [name, call] : calls) {
      threads.emplace_back([&cuda, &returned, &name = name, &call = call] {
        EXPECT_CUDA(cuda.cuCtxSetCurrent(cuda.context));
        EXPECT_EQ(call(), CUDA_SUCCESS) << name;
        ++returned;
      });
    }
    // Each has begun to wait, and one operation of the legacy stream.
    while (cuda.standin_cuda_waits() < calls.size()) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_EQ(returned, 0U);
    EXPECT_EQ(cuda.cuEventQuery(legacy_event), CUDA_ERROR_NOT_READY);
    cuda.standin_cuda_end_kernel(0);
    for (std::thread& thread : threads) thread.join();

    cuda.standin_cuda_begin_kernel(1);
    const std::vector<std::pair<const char*, std::function<CUresult()>>> later{
        {"unregister", [&] { return cuda.cuMemHostUnregister(pageable.data()); }},
        {"free host", [&] { return cuda.cuMemFreeHost(pinned); }},
        {"map", [&] { return cuda.cuMemMap(reserved, 2 << 20, 0, handle, 0); }},
        {"export",
         [&] {
           return cuda.cuMemExportToShareableHandle(&descriptors[1], handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                                    0);
         }},
        {"peer", [&] { return cuda.cuCtxEnablePeerAccess(other, 0); }},
    };
    const auto before = cuda.standin_cuda_waits();
    threads.clear();
    returned = 0;
    for (const auto& [name, call] : later) {
      threads.emplace_back([&cuda, &returned, &name = name, &call = call] {
        EXPECT_CUDA(cuda.cuCtxSetCurrent(cuda.context));
        EXPECT_EQ(call(), CUDA_SUCCESS) << name;
        ++returned;
      });
    }
    while (cuda.standin_cuda_waits() < before + later.size()) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_EQ(returned, 0U);
    cuda.standin_cuda_end_kernel(1);
    for (std::thread& thread : threads) thread.join();
  });
}

// With copies under way: they never end while the process does.
TEST(StandinProcess, EndsCleanly_HoweverItEnds) {
  const auto begin = [](const CudaProcess& cuda) {
    const CUdeviceptr memory = cuda.allocate(1 << 20);
    const auto host = cuda.allocate_host(1 << 20);
    const CUstream stream = cuda.make_stream();
    for (int i = 0; i < 100; ++i) EXPECT_CUDA(cuda.cuMemcpyHtoDAsync_v2(memory, host.data(), host.size(), stream));
  };
  in_process({}, begin);  // std::exit
  const auto result = verbatim::test::run_in_child({}, [&] {
    CudaProcess cuda;
    begin(cuda);
    return testing::Test::HasFailure() ? 1 : 0;  // _exit
  });
  EXPECT_EQ(result.status, 0) << result.stderr_text;
  EXPECT_EQ(result.stderr_text, "");
}

// Nothing remains in a directory, also when all processes are killed.
TEST(StandinProcess, BytesAreInFilesWithoutAName) {
  in_process({}, [](CudaProcess& cuda) {
    cuda.allocate(1 << 20);
    std::ifstream maps("/proc/self/maps");
    unsigned found = 0;
    for (std::string line; std::getline(maps, line);) {
      if (line.find("standin-cuda ") == std::string::npos) continue;
      EXPECT_NE(line.find("/memfd:standin-cuda (deleted)"), std::string::npos) << line;
      ++found;
    }
    EXPECT_EQ(found, 1U);
  });
}

}  // namespace
