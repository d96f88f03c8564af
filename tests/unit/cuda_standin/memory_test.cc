#include <sys/wait.h>

#include <csignal>
#include <numeric>

#include "process.h"

using verbatim::test::CudaProcess;
using verbatim::test::in_process;
using verbatim::test::numbered;

namespace {

// The signal that ends a child which runs `body`.
int signal_of(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);  // a sanitizer would make an exit of it
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

TEST(DriverMemory, Copies_ReturnTheBytes) {
  in_process({}, [](CudaProcess& cuda) {
    const CUdeviceptr from = cuda.allocate(300'000);
    const CUdeviceptr to = cuda.allocate(300'000);
    const auto data = numbered(300'000, 7);
    cuda.upload(from, data);
    const CUstream stream = cuda.make_stream();
    EXPECT_CUDA(cuda.cuMemsetD8Async(to, 9, 300'000, stream));
    EXPECT_CUDA(cuda.cuMemcpyDtoDAsync_v2(to + 13, from + 13, 299'000, stream));
    EXPECT_CUDA(cuda.cuStreamSynchronize(stream));
    const auto result = cuda.download(to, 300'000);
    for (std::size_t i = 0; i < result.size(); ++i) {
      ASSERT_EQ(result[i], i < 13 || i >= 299'013 ? 9 : data[i]) << "at " << i;
    }
  });
}

TEST(DriverMemory, AttributesOfDeviceMemory_DescribeTheAllocation) {
  in_process({}, [](CudaProcess& cuda) {
    const CUdeviceptr address = cuda.allocate(3 << 20);
    const CUdeviceptr inside = address + 12345;
    EXPECT_EQ(cuda.attribute<unsigned>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside), CU_MEMORYTYPE_DEVICE);
    EXPECT_EQ(cuda.attribute<int>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, inside), 0);
    EXPECT_EQ(cuda.attribute<int>(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, inside), 1);
    EXPECT_EQ(cuda.attribute<CUdeviceptr>(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, inside), address);
    EXPECT_EQ(cuda.attribute<std::size_t>(CU_POINTER_ATTRIBUTE_RANGE_SIZE, inside), std::size_t{3} << 20);
    EXPECT_EQ(cuda.attribute<unsigned long long>(CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, inside), 0U);
    CUdeviceptr start = 0;
    std::size_t bytes = 0;
    EXPECT_CUDA(cuda.cuMemGetAddressRange_v2(&start, &bytes, inside));
    EXPECT_EQ(start, address);
    EXPECT_EQ(bytes, std::size_t{3} << 20);
    const CUdeviceptr other = cuda.allocate(100);
    EXPECT_NE(cuda.buffer_id(address), cuda.buffer_id(other));
  });
}

TEST(DriverMemory, AttributesOfHostMemory_OnlyOfPinnedMemory) {
  in_process({}, [](CudaProcess& cuda) {
    std::vector<unsigned char> memory(100'000);
    const auto address = reinterpret_cast<CUdeviceptr>(memory.data());
    unsigned type = 0;
    EXPECT_EQ(cuda.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA(cuda.cuMemHostRegister_v2(memory.data(), memory.size(), 0));
    EXPECT_EQ(cuda.attribute<unsigned>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address + 99'999), CU_MEMORYTYPE_HOST);
    EXPECT_EQ(cuda.cuMemHostRegister_v2(memory.data() + 5, 100, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    EXPECT_CUDA(cuda.cuMemHostUnregister(memory.data()));
    EXPECT_EQ(cuda.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuda.cuMemHostUnregister(memory.data()), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    const auto allocated = cuda.allocate_host(5000);
    allocated[4999] = 1;
    EXPECT_EQ(
        cuda.attribute<unsigned>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, reinterpret_cast<CUdeviceptr>(&allocated[4999])),
        CU_MEMORYTYPE_HOST);
    EXPECT_CUDA(cuda.cuMemFreeHost(allocated.data()));
  });
}

TEST(DriverMemory, AddressThatIsAllocatedAgain_HasANewBufferId) {
  in_process({}, [](CudaProcess& cuda) {
    const CUdeviceptr first = cuda.allocate(4 << 20);
    const auto id = cuda.buffer_id(first);
    EXPECT_CUDA(cuda.cuMemFree_v2(first));
    unsigned type = 0;
    EXPECT_EQ(cuda.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, first), CUDA_ERROR_INVALID_VALUE);
    const CUdeviceptr second = cuda.allocate(4 << 20);
    EXPECT_EQ(second, first);
    EXPECT_NE(cuda.buffer_id(second), id);
  });
}

TEST(DriverMemory, CopyBeyondAnAllocation_IsRefused) {
  in_process({}, [](CudaProcess& cuda) {
    const CUdeviceptr address = cuda.allocate(4 << 20);
    const auto host = cuda.allocate_host(8 << 20);
    const CUstream stream = cuda.make_stream();
    EXPECT_EQ(cuda.cuMemcpyHtoDAsync_v2(address, host.data(), (4 << 20) + 1, stream), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuda.cuMemcpyDtoHAsync_v2(host.data(), address + (4 << 20) - 1, 2, stream), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA(cuda.cuMemcpyDtoHAsync_v2(host.data(), address + (4 << 20) - 1, 1, stream));
    EXPECT_CUDA(cuda.cuStreamSynchronize(stream));
  });
}

TEST(StandinMemory, LoadOrStoreByTheCpu_CrashesTheProcess) {
  in_process({}, [](CudaProcess& cuda) {
    const CUdeviceptr address = cuda.allocate(100'000);
    auto* const pointer = reinterpret_cast<volatile unsigned char*>(address);
    EXPECT_EQ(signal_of([] {}), 0);
    EXPECT_EQ(signal_of([&] { static_cast<void>(pointer[99'999]); }), SIGSEGV);
    EXPECT_EQ(signal_of([&] { pointer[99'999] = 1; }), SIGSEGV);
    EXPECT_CUDA(cuda.cuMemFree_v2(address));
    EXPECT_EQ(signal_of([&] { pointer[0] = 1; }), SIGSEGV);
  });
}

TEST(StandinMemory, SystemCalls_Fail) {
  in_process({}, [](CudaProcess& cuda) {
    auto* const pointer = reinterpret_cast<void*>(cuda.allocate(100'000));
    std::vector<unsigned char> host(100);
    iovec local{host.data(), host.size()};
    iovec remote{pointer, host.size()};
    EXPECT_EQ(process_vm_readv(getpid(), &local, 1, &remote, 1, 0), -1);
    EXPECT_EQ(process_vm_writev(getpid(), &local, 1, &remote, 1, 0), -1);
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    // Not through the functions of the C library, which a sanitizer replaces by ones that look at the memory.
    EXPECT_EQ(syscall(SYS_write, ends[1], pointer, 10), -1);
    EXPECT_EQ(syscall(SYS_write, ends[1], host.data(), 10), 10);
    EXPECT_EQ(syscall(SYS_read, ends[0], pointer, 10), -1);
  });
}

TEST(StandinMemory, MoreThanTheGpuHas_IsRefused) {
  in_process({}, [](CudaProcess& cuda) {
    std::size_t available = 0;
    std::size_t total = 0;
    EXPECT_CUDA(cuda.cuMemGetInfo_v2(&available, &total));
    const CUdeviceptr most = cuda.allocate(available - (1 << 20));
    CUdeviceptr address = 0;
    EXPECT_EQ(cuda.cuMemAlloc_v2(&address, 2 << 20), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_CUDA(cuda.cuMemFree_v2(most));
    EXPECT_CUDA(cuda.cuMemAlloc_v2(&address, 2 << 20));
  });
}

// A registration cache that rounds to pages must tell them apart.
TEST(StandinMemory, SmallAllocations_ShareAPage) {
  in_process({}, [](CudaProcess& cuda) {
    const CUdeviceptr first = cuda.allocate(100);
    const CUdeviceptr second = cuda.allocate(100);
    EXPECT_EQ(first / 4096, second / 4096);
    EXPECT_NE(cuda.buffer_id(first), cuda.buffer_id(second));
    std::vector<unsigned char> data(100, 1);
    cuda.upload(first, data);
    EXPECT_EQ(cuda.download(second, 100), std::vector<unsigned char>(100, 0));
    EXPECT_EQ(cuda.cuMemcpyHtoD_v2(first, data.data(), 1000), CUDA_ERROR_INVALID_VALUE);
  });
}

}  // namespace
