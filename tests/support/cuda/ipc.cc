// Memory of one process in another: CUDA IPC for memory of cuMemAlloc, descriptors for memory of cuMemCreate. Each
// process has its own address for it. The bytes stay until all have closed them.
#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "support/cuda/memory.h"

using standin::Backing;
using standin::Call;
using standin::Context;
using standin::driver;
using standin::Memory;
using standin::Range;

namespace {

constexpr unsigned long long kIpcMagic = 0x7374616e64696e02;

// What is in a CUipcMemHandle: the descriptor of the process that owns the memory. The inode shows whether the
// descriptor is still that of this memory.
struct IpcHandle {
  unsigned long long magic;
  int process;
  int descriptor;
  ino_t inode;
  CUdeviceptr address;
  char unused[32];
};
static_assert(sizeof(IpcHandle) == sizeof(CUipcMemHandle));

std::string descriptor_path(const std::string& process, int descriptor) {
  return "/proc/" + process + "/fd/" + std::to_string(descriptor);
}

}  // namespace

STANDIN_EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  const Call call(Call::kContext | Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  Memory& memory = *driver().memory;
  const auto found = memory.find(address);
  // Not of mapped memory, and not of memory that another process owns.
  if (found == memory.ranges.end() || found->second.kind != Range::Kind::kAllocated) return CUDA_ERROR_INVALID_VALUE;
  const Backing& backing = *found->second.backing;
  const IpcHandle content{.magic = kIpcMagic,
                          .process = getpid(),
                          .descriptor = backing.fd(),
                          .inode = backing.inode(),
                          .address = found->first,
                          .unused = {}};
  std::memcpy(handle, &content, sizeof content);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
  Call call(Call::kContext | Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  IpcHandle content;
  std::memcpy(&content, &handle, sizeof content);
  if (content.magic != kIpcMagic || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
  // Not in the process that owns the memory.
  if (content.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  Context& context = call.context();
  Memory& memory = *driver().memory;
  const auto opened = std::find_if(memory.ranges.begin(), memory.ranges.end(), [&](const auto& entry) {
    const Range& range = entry.second;
    return range.kind == Range::Kind::kImported && range.owner == &context && range.backing->inode() == content.inode;
  });
  if (opened != memory.ranges.end()) {
    ++opened->second.opened;
    *address = opened->first;
    return CUDA_SUCCESS;
  }
  auto backing = Backing::open(descriptor_path(std::to_string(content.process), content.descriptor).c_str());
  if (backing == nullptr || backing->inode() != content.inode) return CUDA_ERROR_MAP_FAILED;
  const int owner = backing->device();
  if (owner != context.device) {
    if (!driver().can_access_peer(context.device, owner)) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    context.peers.insert(owner);
  }
  const std::size_t bytes = backing->bytes();
  *address = memory.take_addresses(bytes, standin::kGranularity);
  // Never the address that it has in the other process.
  if (*address != 0 && *address == content.address) {
    *address = memory.take_addresses(bytes, standin::kGranularity);
    memory.give_addresses(content.address);
  }
  if (*address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  memory.add(
      *address,
      {.kind = Range::Kind::kImported, .backing = std::move(backing), .bytes = bytes, .owner = &context, .opened = 1});
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  const Call call(Call::kContext | Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  Memory& memory = *driver().memory;
  const auto found = memory.ranges.find(address);
  if (found == memory.ranges.end() || found->second.kind != Range::Kind::kImported) return CUDA_ERROR_INVALID_VALUE;
  if (--found->second.opened > 0) return CUDA_SUCCESS;
  memory.ranges.erase(found);
  memory.give_addresses(address);
  return CUDA_SUCCESS;
}

// The descriptor can be sent to another process; by O_PATH it can neither be read nor mapped.
STANDIN_EXPORT CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                                     CUmemAllocationHandleType type, unsigned long long flags) {
  const Call call(Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  const auto found = driver().memory->handles.find(handle);
  if (found == driver().memory->handles.end() || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const Backing& backing = *found->second.backing;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || (backing.handle_types() & static_cast<unsigned>(type)) == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int descriptor = open(descriptor_path("self", backing.fd()).c_str(), O_PATH | O_CLOEXEC);
  if (descriptor < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  std::memcpy(shareable, &descriptor, sizeof descriptor);
  return CUDA_SUCCESS;
}

// The descriptor itself stays with the caller.
STANDIN_EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                                       CUmemAllocationHandleType type) {
  const Call call(Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  const auto descriptor = static_cast<int>(reinterpret_cast<std::intptr_t>(shareable));
  auto backing = Backing::open(descriptor_path("self", descriptor).c_str());
  if (backing == nullptr || backing->handle_types() == 0) return CUDA_ERROR_INVALID_VALUE;
  *handle = driver().memory->hold(std::move(backing));
  return CUDA_SUCCESS;
}

// A descriptor that says nothing and gives no access, as a dma-buf that has no mapping for the CPU. Each call makes
// one.
STANDIN_EXPORT CUresult cuMemGetHandleForAddressRange(void* handle, CUdeviceptr address, size_t bytes,
                                                      CUmemRangeHandleType type, unsigned long long flags) {
  const Call call(Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  constexpr std::size_t kPage = 4096;
  if (type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytes == 0 || bytes % kPage != 0 || address % kPage != 0) return CUDA_ERROR_INVALID_VALUE;
  // Memory that fills the first and the last page in part has both of them.
  Memory& memory = *driver().memory;
  const auto first = memory.ranges.lower_bound(address);
  const bool begins_inside = memory.find(address) == memory.ranges.end() && first != memory.ranges.end();
  const CUdeviceptr begin = begins_inside ? first->first : address;
  const CUdeviceptr last_page = address + bytes - kPage;
  if (begin - address >= kPage || !memory.covers(begin, begin < last_page ? last_page - begin + 1 : 1)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int descriptor = epoll_create1(EPOLL_CLOEXEC);
  if (descriptor < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  std::memcpy(handle, &descriptor, sizeof descriptor);
  return CUDA_SUCCESS;
}
