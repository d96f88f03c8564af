// The layer between NCCL's tables and the transport: converts void* to objects and Error to ncclResult_t, and lets no
// exception out. All versions share it; tables.cc has what differs between versions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nccl/types.h"
#include "net/context/context.h"

namespace verbatim::abi {

constexpr nccl::Result to_nccl(ErrorKind kind) {
  return static_cast<nccl::Result>(kind);
}
static_assert(to_nccl(ErrorKind::kNone) == nccl::Result::kSuccess);
static_assert(to_nccl(ErrorKind::kSystem) == nccl::Result::kSystemError);
static_assert(to_nccl(ErrorKind::kInternal) == nccl::Result::kInternalError);
static_assert(to_nccl(ErrorKind::kArgument) == nccl::Result::kInvalidArgument);
static_assert(to_nccl(ErrorKind::kUsage) == nccl::Result::kInvalidUsage);
static_assert(to_nccl(ErrorKind::kRemote) == nccl::Result::kRemoteError);

// v11 and later: one context for each communicator. `traffic_class`: the communicator's or kNetTrafficClassUndefined.
nccl::Result init(int version, void** context, int traffic_class, nccl::DebugLogger logger) noexcept;
// finalize(nullptr) does nothing.
nccl::Result finalize(void* context) noexcept;

// v10 and earlier: one context for the process, closed when the library is unloaded.
nccl::Result init_process(int version, nccl::DebugLogger logger) noexcept;

// setNetAttr. The attributes are hints.
nccl::Result announce(void* context, const Announcement& announcement) noexcept;

nccl::Result devices(int* count) noexcept;
nccl::Result device_properties(int device, DeviceProperties& properties) noexcept;
// makeVDevice of a table that allows `max` members.
nccl::Result merge_devices(int* device, const int* members, int count, std::size_t max) noexcept;
nccl::Result listen(void* context, int device, void* handle, void** listen_comm) noexcept;
nccl::Result connect(void* context, int device, int traffic_class, void* handle, void** send_comm) noexcept;
nccl::Result accept(void* listen_comm, void** recv_comm) noexcept;
nccl::Result reg_mr(void* comm, void* data, std::size_t size, int type, void** mhandle) noexcept;
nccl::Result reg_mr_dmabuf(void* comm, void* data, std::size_t size, int type, std::uint64_t offset, int fd,
                           void** mhandle) noexcept;
nccl::Result dereg_mr(void* comm, void* mhandle) noexcept;
nccl::Result isend(void* send_comm, void* data, std::size_t size, int tag, void* mhandle, void** request) noexcept;
nccl::Result iflush(void* recv_comm, int n, void** data, int* sizes, void** mhandles, void** request) noexcept;
nccl::Result test(void* request, int* done, int* sizes) noexcept;
nccl::Result close_comm(void* comm) noexcept;
nccl::Result close_listen(void* listen_comm) noexcept;

}  // namespace verbatim::abi
