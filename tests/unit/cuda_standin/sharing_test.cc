// Memory of one process in another: a second process is forked before either uses the driver.
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <csignal>
#include <cstdint>
#include <cstring>

#include "process.h"

using verbatim::test::check_in_child;
using verbatim::test::CudaProcess;
using verbatim::test::in_process;
using verbatim::test::numbered;

namespace {

constexpr std::size_t kBytes = 4 << 20;

// Sends values and descriptors to the other process.
class Channel {
 public:
  explicit Channel(int end) : end_(end) {}

  template <typename Value>
  void send(const Value& value, int descriptor = -1) const {
    iovec data{const_cast<Value*>(&value), sizeof value};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof descriptor)] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    if (descriptor >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof descriptor);
      std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    }
    if (sendmsg(end_, &message, MSG_NOSIGNAL) != sizeof value) throw std::runtime_error("the other process has ended");
  }
  template <typename Value>
  Value receive(int* descriptor = nullptr) const {
    Value value;
    iovec data{&value, sizeof value};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof *descriptor)];
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (recvmsg(end_, &message, 0) != sizeof value) throw std::runtime_error("the other process has ended");
    if (descriptor != nullptr) std::memcpy(descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof *descriptor);
    return value;
  }

 private:
  int end_;
};

using Side = std::function<void(CudaProcess&, const Channel&)>;

// Both run at once, each in a process of its own. The exporter is killed at its end where the test says so.
void in_two_processes(const Side& exporter, const Side& importer, bool kill_exporter = false) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    try {
      CudaProcess cuda;
      exporter(cuda, Channel(ends[1]));
    } catch (const std::exception& failure) {
      ADD_FAILURE() << failure.what();
    }
    std::fflush(nullptr);
    if (kill_exporter) raise(SIGKILL);
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  close(ends[1]);
  check_in_child({}, [&] {
    CudaProcess cuda;
    importer(cuda, Channel(ends[0]));
  });
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(kill_exporter || status == 0) << status;
}

CUmemAllocationProp properties(CUmemAllocationHandleType handle_type, int device = 0) {
  CUmemAllocationProp result{};
  result.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  result.requestedHandleTypes = handle_type;
  result.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  return result;
}

CUdeviceptr map(const CudaProcess& cuda, CUmemGenericAllocationHandle handle, std::size_t bytes) {
  CUdeviceptr address = 0;
  REQUIRE_CUDA(cuda.cuMemAddressReserve(&address, bytes, 0, 0, 0));
  REQUIRE_CUDA(cuda.cuMemMap(address, bytes, 0, handle, 0));
  return address;
}

void allow(const CudaProcess& cuda, CUdeviceptr address, std::size_t bytes, int device,
           CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device}, flags};
  REQUIRE_CUDA(cuda.cuMemSetAccess(address, bytes, &access, 1));
}

CUmemGenericAllocationHandle create(const CudaProcess& cuda, std::size_t bytes, CUmemAllocationHandleType type) {
  CUmemGenericAllocationHandle handle = 0;
  const auto wanted = properties(type);
  REQUIRE_CUDA(cuda.cuMemCreate(&handle, bytes, &wanted, 0));
  return handle;
}

TEST(DriverSharing, IpcHandle_ReachesTheMemoryOfTheOtherProcess) {
  in_two_processes(
      [](CudaProcess& cuda, const Channel& channel) {
        const CUdeviceptr memory = cuda.allocate(kBytes);
        cuda.upload(memory, numbered(kBytes, 1));
        CUipcMemHandle handle;
        EXPECT_CUDA(cuda.cuIpcGetMemHandle(&handle, memory));
        CUdeviceptr own = 0;
        EXPECT_EQ(cuda.cuIpcOpenMemHandle_v2(&own, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
                  CUDA_ERROR_INVALID_CONTEXT);
        channel.send(handle);
        channel.receive<bool>();
        EXPECT_EQ(cuda.download(memory, kBytes), numbered(kBytes, 2));
        channel.send(true);
        channel.receive<bool>();
      },
      [](CudaProcess& cuda, const Channel& channel) {
        const auto handle = channel.receive<CUipcMemHandle>();
        CUdeviceptr memory = 0;
        REQUIRE_CUDA(cuda.cuIpcOpenMemHandle_v2(&memory, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        EXPECT_EQ(cuda.attribute<unsigned>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory), CU_MEMORYTYPE_DEVICE);
        EXPECT_EQ(cuda.download(memory, kBytes), numbered(kBytes, 1));
        cuda.upload(memory, numbered(kBytes, 2));
        channel.send(true);
        channel.receive<bool>();
        EXPECT_CUDA(cuda.cuIpcCloseMemHandle(memory));
        EXPECT_NE(cuda.cuIpcCloseMemHandle(memory), CUDA_SUCCESS);
        channel.send(true);
      });
}

TEST(DriverSharing, Descriptor_ReachesTheMemoryOfTheOtherProcess) {
  in_two_processes(
      [](CudaProcess& cuda, const Channel& channel) {
        const auto handle = create(cuda, kBytes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        const CUdeviceptr memory = map(cuda, handle, kBytes);
        allow(cuda, memory, kBytes, 0);
        cuda.upload(memory, numbered(kBytes, 1));
        EXPECT_CUDA(cuda.cuMemRelease(handle));
        CUmemGenericAllocationHandle again = 0;
        EXPECT_CUDA(cuda.cuMemRetainAllocationHandle(&again, reinterpret_cast<void*>(memory + 4096)));
        int descriptor = -1;
        EXPECT_CUDA(cuda.cuMemExportToShareableHandle(&descriptor, again, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        EXPECT_CUDA(cuda.cuMemRelease(again));
        channel.send(memory, descriptor);
        close(descriptor);
        channel.receive<bool>();
        EXPECT_EQ(cuda.download(memory, kBytes), numbered(kBytes, 2));
        EXPECT_CUDA(cuda.cuMemUnmap(memory, kBytes));
        EXPECT_CUDA(cuda.cuMemAddressFree(memory, kBytes));
      },
      [](CudaProcess& cuda, const Channel& channel) {
        int descriptor = -1;
        channel.receive<CUdeviceptr>(&descriptor);
        CUmemGenericAllocationHandle handle = 0;
        REQUIRE_CUDA(cuda.cuMemImportFromShareableHandle(
            &handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        close(descriptor);
        const CUdeviceptr memory = map(cuda, handle, kBytes);
        EXPECT_CUDA(cuda.cuMemRelease(handle));
        allow(cuda, memory, kBytes, 0);
        EXPECT_EQ(cuda.download(memory, kBytes), numbered(kBytes, 1));
        cuda.upload(memory, numbered(kBytes, 2));
        channel.send(true);
      });
}

TEST(DriverSharing, MemoryWithoutHandleType_CannotBeExported) {
  in_process({}, [](CudaProcess& cuda) {
    const auto handle = create(cuda, kBytes, CU_MEM_HANDLE_TYPE_NONE);
    int descriptor = -1;
    EXPECT_NE(cuda.cuMemExportToShareableHandle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
              CUDA_SUCCESS);
    const CUdeviceptr memory = map(cuda, handle, kBytes);
    EXPECT_EQ(cuda.attribute<unsigned long long>(CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, memory), 0U);
    EXPECT_EQ(cuda.attribute<int>(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, memory), 0);
    CUipcMemHandle ipc;
    EXPECT_NE(cuda.cuIpcGetMemHandle(&ipc, memory), CUDA_SUCCESS);
    const CUdeviceptr allocated = cuda.allocate(kBytes);
    CUmemGenericAllocationHandle retained = 0;
    EXPECT_NE(cuda.cuMemRetainAllocationHandle(&retained, reinterpret_cast<void*>(allocated)), CUDA_SUCCESS);
  });
}

TEST(DriverSharing, MappedMemory_HasRangesAndBufferIdsOfItsMappings) {
  in_process({}, [](CudaProcess& cuda) {
    const auto first = create(cuda, kBytes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    const auto second = create(cuda, kBytes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    CUdeviceptr memory = 0;
    REQUIRE_CUDA(cuda.cuMemAddressReserve(&memory, 2 * kBytes, 0, 0, 0));
    REQUIRE_CUDA(cuda.cuMemMap(memory, kBytes, 0, first, 0));
    REQUIRE_CUDA(cuda.cuMemMap(memory + kBytes, kBytes, 0, second, 0));
    EXPECT_NE(cuda.cuMemMap(memory, kBytes, 0, second, 0), CUDA_SUCCESS) << "is mapped";
    allow(cuda, memory, 2 * kBytes, 0);
    EXPECT_EQ(cuda.attribute<CUdeviceptr>(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, memory + kBytes + 1), memory + kBytes);
    EXPECT_EQ(cuda.attribute<std::size_t>(CU_POINTER_ATTRIBUTE_RANGE_SIZE, memory + kBytes + 1), kBytes);
    EXPECT_EQ(cuda.attribute<unsigned long long>(CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, memory), 1U);
    EXPECT_NE(cuda.buffer_id(memory), cuda.buffer_id(memory + kBytes));
    cuda.upload(memory, numbered(2 * kBytes, 3));
    EXPECT_EQ(cuda.download(memory + kBytes - 100, 200), [] {
      const auto all = numbered(2 * kBytes, 3);
      return std::vector<unsigned char>(all.begin() + kBytes - 100, all.begin() + kBytes + 100);
    }());
    const auto id = cuda.buffer_id(memory);
    EXPECT_NE(cuda.cuMemUnmap(memory, kBytes / 2), CUDA_SUCCESS) << "part of a mapping";
    EXPECT_CUDA(cuda.cuMemUnmap(memory, kBytes));
    unsigned type = 0;
    EXPECT_NE(cuda.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_BUFFER_ID, memory), CUDA_SUCCESS);
    REQUIRE_CUDA(cuda.cuMemMap(memory, kBytes, 0, first, 0));
    EXPECT_NE(cuda.buffer_id(memory), id);
  });
}

TEST(DriverSharing, DmaBufDescriptors_GiveTheCpuNoAccess) {
  in_process({}, [](CudaProcess& cuda) {
    const CUdeviceptr memory = cuda.allocate(kBytes);
    int first = -1;
    int second = -1;
    EXPECT_CUDA(cuda.cuMemGetHandleForAddressRange(&first, memory, kBytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
    EXPECT_CUDA(cuda.cuMemGetHandleForAddressRange(&second, memory, kBytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
    EXPECT_NE(first, second);
    char byte = 0;
    EXPECT_EQ(read(first, &byte, 1), -1);
    EXPECT_EQ(write(first, &byte, 1), -1);
    EXPECT_EQ(mmap(nullptr, 4096, PROT_READ, MAP_SHARED, first, 0), MAP_FAILED);
    EXPECT_EQ(close(first), 0);
    EXPECT_EQ(close(second), 0);
    EXPECT_NE(cuda.cuMemGetHandleForAddressRange(&first, memory + 100, 4096, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0),
              CUDA_SUCCESS);
    EXPECT_NE(
        cuda.cuMemGetHandleForAddressRange(&first, memory, kBytes + (64 << 20), CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0),
        CUDA_SUCCESS);
  });
}

TEST(StandinSharing, ExportedDescriptor_GivesTheCpuNoAccess) {
  in_process({}, [](CudaProcess& cuda) {
    const auto handle = create(cuda, kBytes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    int descriptor = -1;
    EXPECT_CUDA(cuda.cuMemExportToShareableHandle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    char byte = 0;
    EXPECT_EQ(pread(descriptor, &byte, 1, 0), -1);
    EXPECT_EQ(pwrite(descriptor, &byte, 1, 0), -1);
    EXPECT_EQ(mmap(nullptr, 4096, PROT_READ, MAP_SHARED, descriptor, 0), MAP_FAILED);
    CUmemGenericAllocationHandle imported = 0;
    EXPECT_NE(cuda.cuMemImportFromShareableHandle(&imported, nullptr, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
              CUDA_SUCCESS);
  });
}

TEST(StandinSharing, AccessIsPerGpu_CopyWithoutAccessFaults) {
  in_process({}, [](CudaProcess& cuda) {
    const auto handle = create(cuda, kBytes, CU_MEM_HANDLE_TYPE_NONE);
    const CUdeviceptr memory = map(cuda, handle, kBytes);
    const auto host = cuda.allocate_host(kBytes);
    const auto copy = [&](bool write) {
      const CUstream stream = cuda.make_stream();
      EXPECT_CUDA(write ? cuda.cuMemcpyHtoDAsync_v2(memory, host.data(), kBytes, stream)
                        : cuda.cuMemcpyDtoHAsync_v2(host.data(), memory, kBytes, stream));
      return cuda.cuStreamSynchronize(stream);
    };
    allow(cuda, memory, kBytes, 0);
    EXPECT_EQ(copy(true), CUDA_SUCCESS);
    cuda.use_device(1);
    EXPECT_EQ(copy(false), CUDA_ERROR_ILLEGAL_ADDRESS) << "of GPU 1";
    cuda.use_device(0);
    allow(cuda, memory, kBytes, 0, CU_MEM_ACCESS_FLAGS_PROT_READ);
    EXPECT_EQ(copy(false), CUDA_SUCCESS);
    EXPECT_EQ(copy(true), CUDA_ERROR_ILLEGAL_ADDRESS) << "read only";
  });
}

TEST(StandinSharing, CopyOfMemoryThatIsUnmappedMeanwhile_Faults) {
  in_process({{"STANDIN_CUDA_DELAY_US", "300000"}}, [](CudaProcess& cuda) {
    const auto handle = create(cuda, kBytes, CU_MEM_HANDLE_TYPE_NONE);
    const CUdeviceptr memory = map(cuda, handle, kBytes);
    allow(cuda, memory, kBytes, 0);
    const auto host = cuda.allocate_host(kBytes);
    const CUstream stream = cuda.make_stream();
    for (int i = 0; i < 10; ++i) EXPECT_CUDA(cuda.cuMemcpyHtoDAsync_v2(memory, host.data(), 8, stream));
    EXPECT_CUDA(cuda.cuMemUnmap(memory, kBytes));
    EXPECT_EQ(cuda.cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
    CUdeviceptr other = 0;
    EXPECT_EQ(cuda.cuMemAlloc_v2(&other, 100), CUDA_ERROR_ILLEGAL_ADDRESS) << "the context has failed";
  });
}

TEST(StandinSharing, OpenedMemory_OutlivesTheProcessThatOwnsIt) {
  in_two_processes(
      [](CudaProcess& cuda, const Channel& channel) {
        const CUdeviceptr memory = cuda.allocate(kBytes);
        cuda.upload(memory, numbered(kBytes, 1));
        CUipcMemHandle handle;
        EXPECT_CUDA(cuda.cuIpcGetMemHandle(&handle, memory));
        channel.send(handle);
        channel.send(memory);
        channel.receive<bool>();
      },
      [](CudaProcess& cuda, const Channel& channel) {
        const auto handle = channel.receive<CUipcMemHandle>();
        const auto exported = channel.receive<CUdeviceptr>();
        CUdeviceptr memory = 0;
        CUdeviceptr again = 0;
        REQUIRE_CUDA(cuda.cuIpcOpenMemHandle_v2(&memory, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        REQUIRE_CUDA(cuda.cuIpcOpenMemHandle_v2(&again, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        EXPECT_EQ(memory, again);
        EXPECT_NE(memory, exported);
        channel.send(true);
        EXPECT_THROW(channel.receive<bool>(), std::runtime_error) << "the owner is alive";
        EXPECT_EQ(cuda.download(memory, kBytes), numbered(kBytes, 1));
        EXPECT_CUDA(cuda.cuIpcCloseMemHandle(memory));
        EXPECT_EQ(cuda.download(memory, kBytes), numbered(kBytes, 1)) << "was opened twice";
        EXPECT_CUDA(cuda.cuIpcCloseMemHandle(memory));
        EXPECT_EQ(cuda.cuIpcOpenMemHandle_v2(&memory, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
                  CUDA_ERROR_MAP_FAILED);
      },
      true);
}

TEST(StandinSharing, HandleOfFreedMemory_DoesNotOpenItsSuccessor) {
  in_two_processes(
      [](CudaProcess& cuda, const Channel& channel) {
        const CUdeviceptr memory = cuda.allocate(kBytes);
        CUipcMemHandle handle;
        EXPECT_CUDA(cuda.cuIpcGetMemHandle(&handle, memory));
        EXPECT_CUDA(cuda.cuMemFree_v2(memory));
        EXPECT_EQ(cuda.allocate(kBytes), memory);
        channel.send(handle);
        channel.receive<bool>();
      },
      [](CudaProcess& cuda, const Channel& channel) {
        const auto handle = channel.receive<CUipcMemHandle>();
        CUdeviceptr memory = 0;
        EXPECT_EQ(cuda.cuIpcOpenMemHandle_v2(&memory, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
                  CUDA_ERROR_MAP_FAILED);
        channel.send(true);
      });
}

TEST(StandinSharing, WithoutPeerAccess_MemoryOfTheOtherGpuIsOutOfReach) {
  in_process({{"STANDIN_CUDA_PEER", "0"}}, [](CudaProcess& cuda) {
    EXPECT_FALSE(cuda.has_peer());
    const CUcontext second = cuda.use_device(1);
    const CUdeviceptr there = cuda.allocate(kBytes);
    cuda.use_device(0);
    const CUdeviceptr here = cuda.allocate(kBytes);
    EXPECT_EQ(cuda.cuCtxEnablePeerAccess(second, 0), CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const CUdeviceptr mapped = map(cuda, create(cuda, kBytes, CU_MEM_HANDLE_TYPE_NONE), kBytes);
    EXPECT_NE(cuda.cuMemSetAccess(mapped, kBytes, &access, 1), CUDA_SUCCESS);
    EXPECT_CUDA(cuda.cuMemcpyDtoDAsync_v2(there, here, 100, cuda.make_stream()));
    EXPECT_EQ(cuda.standin_cuda_pageable_copies(), 1U) << "the driver stages it";
  });
}

TEST(StandinSharing, PeerAccess_CopiesDirectly) {
  in_process({}, [](CudaProcess& cuda) {
    const CUcontext second = cuda.use_device(1);
    const CUdeviceptr there = cuda.allocate(kBytes);
    EXPECT_EQ(cuda.attribute<int>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, there), 1);
    cuda.use_device(0);
    const CUdeviceptr here = cuda.allocate(kBytes);
    cuda.upload(here, numbered(kBytes, 5));
    EXPECT_TRUE(cuda.has_peer());
    EXPECT_CUDA(cuda.cuCtxEnablePeerAccess(second, 0));
    EXPECT_EQ(cuda.cuCtxEnablePeerAccess(second, 0), CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    const auto staged = cuda.standin_cuda_pageable_copies();
    const CUstream stream = cuda.make_stream();
    EXPECT_CUDA(cuda.cuMemcpyDtoDAsync_v2(there, here, kBytes, stream));
    EXPECT_CUDA(cuda.cuStreamSynchronize(stream));
    EXPECT_EQ(cuda.standin_cuda_pageable_copies(), staged);
    cuda.use_device(1);
    EXPECT_EQ(cuda.download(there, kBytes), numbered(kBytes, 5));
  });
}

}  // namespace
