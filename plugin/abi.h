// The layer between NCCL's tables and the transport: converts void* to objects and Error to ncclResult_t, and lets no
// exception out. All versions share it; net_vN.cc has only what differs in its version.
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>

#include "nccl/types.h"
#include "net/context/context.h"
#include "net/transfer/recv_comm.h"

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

constexpr const char* kName = "Verbatim";

// v11 and later: one context for each communicator. `traffic_class`: the communicator's or kNetTrafficClassUndefined.
nccl::Result init(int version, void** context, int traffic_class, nccl::DebugLogger logger) noexcept;
// finalize(nullptr) does nothing.
nccl::Result finalize(void* context) noexcept;

// v10 and earlier: one context for the process, closed when the library is unloaded.
nccl::Result init_process(int version, nccl::DebugLogger logger) noexcept;
template <int kVersion>
nccl::Result init_process(nccl::DebugLogger logger) noexcept {
  return init_process(kVersion, logger);
}
void* process_context() noexcept;

// setNetAttr. The attributes are hints.
nccl::Result announce(void* context, const Announcement& announcement) noexcept;

nccl::Result devices(int* count) noexcept;
nccl::Result device_properties(int device, DeviceProperties& properties) noexcept;
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

// Converts a size that the interface passes as int (up to v8) or size_t. False: it is negative.
inline bool widen(int size, std::size_t& wide) {
  wide = static_cast<std::size_t>(size);
  return size >= 0;
}
inline bool widen(std::size_t size, std::size_t& wide) {
  wide = size;
  return true;
}

// The functions below have signatures that several versions share.

// v6 and v7: the size of a registration is int.
inline nccl::Result reg_mr_int(void* comm, void* data, int size, int type, void** mhandle) noexcept {
  std::size_t wide = 0;
  return widen(size, wide) ? reg_mr(comm, data, wide, type, mhandle) : nccl::Result::kInvalidArgument;
}

// v6 to v8: the size of a message is int.
inline nccl::Result isend_int(void* send_comm, void* data, int size, int tag, void* mhandle, void** request) noexcept {
  std::size_t wide = 0;
  return widen(size, wide) ? isend(send_comm, data, wide, tag, mhandle, request) : nccl::Result::kInvalidArgument;
}

// From v7 on: a handle for device offload, which this plugin does not set.
inline nccl::Result accept_offload(void* listen_comm, void** recv_comm, nccl::NetDeviceHandle**) noexcept {
  return accept(listen_comm, recv_comm);
}

// From v10 on: profiler handles, which this plugin does not use.
inline nccl::Result isend_profiled(void* send_comm, void* data, std::size_t size, int tag, void* mhandle, void*,
                                   void** request) noexcept {
  return isend(send_comm, data, size, tag, mhandle, request);
}

// `sizes` are int up to v8, size_t from v9 on. NCCL's arrays are not copied.
template <typename Size>
nccl::Result irecv(void* recv_comm, int n, void** data, Size* sizes, int* tags, void** mhandles,
                   void** request) noexcept {
  return to_nccl(static_cast<RecvComm*>(as_comm(recv_comm))->irecv<Size>(n, data, sizes, tags, mhandles, request));
}

inline nccl::Result irecv_profiled(void* recv_comm, int n, void** data, std::size_t* sizes, int* tags, void** mhandles,
                                   void**, void** request) noexcept {
  return irecv(recv_comm, n, data, sizes, tags, mhandles, request);
}

// The properties that all versions have.
template <typename Properties>
void fill_properties(const DeviceProperties& source, Properties& properties) {
  properties = {};
  properties.name = const_cast<char*>(source.name);
  properties.pciPath = const_cast<char*>(source.pci_path);
  properties.guid = source.port.guid;
  properties.ptrSupport = static_cast<int>(source.port.ptr_support);
  properties.speed = static_cast<int>(std::min<std::uint32_t>(source.port.speed_mbps, INT_MAX));
  properties.port = static_cast<int>(source.port.topology_port);
  properties.latency = 0;  // NCCL adds its own estimate
  properties.maxComms = source.max_qps;
  properties.maxRecvs = static_cast<int>(source.max_recvs);
}

// From v7 on.
template <typename Properties>
void fill_offload(Properties& properties) {
  properties.netDeviceType = nccl::NetDeviceType::kHost;
  properties.netDeviceVersion = nccl::kNetDeviceInvalidVersion;
}

// From v9 on: the limits, and the virtual device of a physical device, which consists of this device only.
template <typename Properties>
void fill_limits(int device, Properties& properties) {
  properties.regIsGlobal = 1;
  properties.forceFlush = 0;
  properties.vProps.ndevs = 1;
  properties.vProps.devs[0] = device;
  properties.maxP2pBytes = nccl::kMaxNetSizeBytes;
  properties.maxCollBytes = nccl::kMaxNetSizeBytes;
}

// From v11 on. Uses the upper ends of the ranges; -1 means that NCCL does not know the number.
template <typename CommAttr>
AnnouncedFlows announced_flows(const CommAttr& attributes, std::uint32_t operations) {
  return {.peers = static_cast<unsigned>(std::max(attributes.maxConcurrentPeers, 0)),
          .flows = static_cast<unsigned>(std::max(attributes.maxFlowsPerPeer, 0)),
          .collective = (operations & nccl::kNetCollectiveOperations) != 0 &&
                        (operations & nccl::kNetPointToPointOperations) == 0};
}

template <typename Attributes>
nccl::Result set_net_attr(void* context, Attributes* attributes) noexcept {
  if (attributes == nullptr) return nccl::Result::kInvalidArgument;
  return announce(context, {announced_flows(attributes->sendCommAttr, attributes->op),
                            announced_flows(attributes->recvCommAttr, attributes->op)});
}

}  // namespace verbatim::abi
