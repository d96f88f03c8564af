// The layer between NCCL's tables and the transport: converts void* to objects and Error to ncclResult_t, and lets no
// exception out. All versions share it; tables.cc has what differs between versions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "nccl/net_v12.h"
#include "nccl/types.h"
#include "net/context/context.h"
#include "wire/handle.h"

namespace verbatim::abi {

constexpr nccl::Result to_nccl(ErrorKind kind) {
  return static_cast<nccl::Result>(kind);
}
constexpr nccl::Result to_nccl(const Error& error) {
  return to_nccl(error.kind);
}
static_assert(to_nccl(ErrorKind::kNone) == nccl::Result::kSuccess);
static_assert(to_nccl(ErrorKind::kSystem) == nccl::Result::kSystemError);
static_assert(to_nccl(ErrorKind::kInternal) == nccl::Result::kInternalError);
static_assert(to_nccl(ErrorKind::kArgument) == nccl::Result::kInvalidArgument);
static_assert(to_nccl(ErrorKind::kUsage) == nccl::Result::kInvalidUsage);
static_assert(to_nccl(ErrorKind::kRemote) == nccl::Result::kRemoteError);

// Gives NCCL a new object as Object*. A null pointer without an error is success too: NCCL calls again.
template <typename Object, typename Made>
nccl::Result store(const Result<Made*>& made, void** object) {
  if (!made) return to_nccl(made.error());
  *object = static_cast<Object*>(*made);
  return nccl::Result::kSuccess;
}

// To be called by every init. The first one after loading logs the version of the table, because NCCL has just logged
// the versions that it did not find in the plugin. `table`: "net" or "RMA".
void first_init(const char* table, int version, nccl::DebugLogger logger);

inline std::span<std::uint8_t, wire::kHandleBytes> handle_bytes(void* handle) {
  static_assert(wire::kHandleBytes == nccl::kNetHandleMaxBytes);
  return std::span<std::uint8_t, wire::kHandleBytes>(static_cast<std::uint8_t*>(handle), wire::kHandleBytes);
}

// v11 and later: one context for each communicator. `traffic_class`: the communicator's or kNetTrafficClassUndefined.
nccl::Result init(int version, void** context, int traffic_class, nccl::DebugLogger logger,
                  nccl::ProfilerCallback profiler) noexcept;
// finalize(nullptr) does nothing.
nccl::Result finalize(void* context) noexcept;

// v10 and earlier: one context for the process, closed when the library is unloaded.
nccl::Result init_process(int version, nccl::DebugLogger logger, nccl::ProfilerCallback profiler) noexcept;

// setNetAttr. The attributes are hints.
nccl::Result announce(void* context, const Announcement& announcement) noexcept;

nccl::Result devices(int* count) noexcept;
nccl::Result device_properties(int device, DeviceProperties& properties) noexcept;
// getProperties of net table v12, which the RMA tables share (tables.cc).
nccl::Result get_properties_v12(int device, nccl::v12::NetProperties* properties) noexcept;
// makeVDevice of a table that allows `max` members.
nccl::Result merge_devices(int* device, const int* members, int count, std::size_t max) noexcept;
nccl::Result listen(void* context, int device, void* handle, void** listen_comm) noexcept;
nccl::Result connect(void* context, int device, int traffic_class, void* handle, void** send_comm) noexcept;
nccl::Result accept(void* listen_comm, void** recv_comm) noexcept;
nccl::Result reg_mr(void* comm, void* data, std::size_t size, int type, void** mhandle) noexcept;
nccl::Result reg_mr_dmabuf(void* comm, void* data, std::size_t size, int type, std::uint64_t offset, int fd,
                           void** mhandle) noexcept;
nccl::Result dereg_mr(void* comm, void* mhandle) noexcept;
// `profiler_handle`: nullptr for none.
nccl::Result isend(void* send_comm, void* data, std::size_t size, int tag, void* mhandle, void* profiler_handle,
                   void** request) noexcept;
nccl::Result iflush(void* recv_comm, int n, void** data, int* sizes, void** mhandles, void** request) noexcept;
nccl::Result test(void* request, int* done, int* sizes) noexcept;
nccl::Result close_comm(void* comm) noexcept;
nccl::Result close_listen(void* listen_comm) noexcept;

}  // namespace verbatim::abi
