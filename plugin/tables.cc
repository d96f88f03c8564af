// NCCL's net tables, versions 6 to 12. A table differs from the one before it in the members of its structures and in
// the signatures of its functions. Functions here with the same name have the signatures of different versions: the
// type of the table's member selects one of them.
#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "abi.h"
#include "exit.h"
#include "nccl/net_v10.h"
#include "nccl/net_v11.h"
#include "nccl/net_v12.h"
#include "nccl/net_v6.h"
#include "nccl/net_v7.h"
#include "nccl/net_v8.h"
#include "nccl/net_v9.h"
#include "net/transfer/recv_comm.h"

namespace verbatim::abi {

// Up to v9.
template <int kVersion>
nccl::Result init(nccl::DebugLogger logger) noexcept {
  return init_process(kVersion, logger, nullptr);
}

// v10.
template <int kVersion>
nccl::Result init(nccl::DebugLogger logger, nccl::ProfilerCallback profiler) noexcept {
  return init_process(kVersion, logger, profiler);
}

template <typename CommConfig>
int traffic_class_of(const CommConfig* config) {
  return config != nullptr ? config->trafficClass : nccl::kNetTrafficClassUndefined;
}

// From v11 on: a context for each communicator.
template <int kVersion, typename CommConfig>
nccl::Result init(void** context, std::uint64_t, CommConfig* config, nccl::DebugLogger logger,
                  nccl::ProfilerCallback profiler) noexcept {
  return init(kVersion, context, traffic_class_of(config), logger, profiler);
}

template <typename Properties>
nccl::Result get_properties(int device, Properties* properties) noexcept {
  DeviceProperties source;
  if (const nccl::Result found = device_properties(device, source); found != nccl::Result::kSuccess) return found;
  *properties = {};
  properties->name = const_cast<char*>(source.name);
  properties->pciPath = const_cast<char*>(source.pci_path);
  properties->guid = source.guid;
  properties->ptrSupport = static_cast<int>(source.ptr_support);
  properties->speed = static_cast<int>(std::min<std::uint64_t>(source.speed_mbps, INT_MAX));
  properties->port = static_cast<int>(source.topology_port);
  properties->latency = 0;  // NCCL adds its own estimate
  properties->maxComms = source.max_qps;
  properties->maxRecvs = static_cast<int>(source.max_recvs);
  if constexpr (requires { properties->netDeviceType; }) {  // from v7 on
    properties->netDeviceType = nccl::NetDeviceType::kHost;
    properties->netDeviceVersion = nccl::kNetDeviceInvalidVersion;
  }
  if constexpr (requires { properties->regIsGlobal; }) properties->regIsGlobal = 1;  // from v8 on
  if constexpr (requires { properties->vProps; }) {                                  // from v9 on
    if (source.members.size() > std::size(properties->vProps.devs)) return nccl::Result::kInvalidArgument;
    properties->forceFlush = source.force_flush ? 1 : 0;
    properties->vProps.ndevs = static_cast<int>(source.members.size());
    std::copy(source.members.begin(), source.members.end(), properties->vProps.devs);
    properties->maxP2pBytes = nccl::kMaxNetSizeBytes;
    properties->maxCollBytes = nccl::kMaxNetSizeBytes;
  }
  if constexpr (requires { properties->maxMultiRequestSize; }) properties->maxMultiRequestSize = 1;  // from v11 on
  if constexpr (requires { properties->railId; }) {                                                  // from v12 on
    properties->railId = static_cast<std::int16_t>(source.rail_id);
    properties->planeId = static_cast<std::int16_t>(source.plane_id);
  }
  return nccl::Result::kSuccess;
}

nccl::Result get_properties_v12(int device, nccl::v12::NetProperties* properties) noexcept {
  return get_properties(device, properties);
}

// From v9 on: up to v11 with 4 members, then with 8.
template <typename VDeviceProps>
nccl::Result make_vdevice(int* device, VDeviceProps* properties) noexcept {
  static_assert(std::size(decltype(properties->devs){}) <= wire::kMaxDevices);
  if (device == nullptr || properties == nullptr) return nccl::Result::kInvalidArgument;
  return merge_devices(device, properties->devs, properties->ndevs, std::size(properties->devs));
}

// Up to v10: the context of the process.
nccl::Result listen(int device, void* handle, void** listen_comm) noexcept {
  return listen(g_process_context.load(), device, handle, listen_comm);
}

nccl::Result connect(int device, void* handle, void** send_comm) noexcept {
  return connect(g_process_context.load(), device, nccl::kNetTrafficClassUndefined, handle, send_comm);
}

// From v7 on: a handle for device offload, which this plugin does not set.
nccl::Result connect(int device, void* handle, void** send_comm, nccl::NetDeviceHandle**) noexcept {
  return connect(device, handle, send_comm);
}

// v10: the communicator's settings.
nccl::Result connect(int device, nccl::v10::NetCommConfig* config, void* handle, void** send_comm,
                     nccl::NetDeviceHandle**) noexcept {
  return connect(g_process_context.load(), device, traffic_class_of(config), handle, send_comm);
}

// From v11 on.
nccl::Result connect(void* context, int device, void* handle, void** send_comm, nccl::NetDeviceHandle**) noexcept {
  return connect(context, device, nccl::kNetTrafficClassUndefined, handle, send_comm);
}

// From v7 on.
nccl::Result accept(void* listen_comm, void** recv_comm, nccl::NetDeviceHandle**) noexcept {
  return accept(listen_comm, recv_comm);
}

// v6 and v7: the size of a registration is int.
nccl::Result reg_mr(void* comm, void* data, int size, int type, void** mhandle) noexcept {
  if (size < 0) return nccl::Result::kInvalidArgument;
  return reg_mr(comm, data, static_cast<std::size_t>(size), type, mhandle);
}

// Up to v8: the size of a message is int.
nccl::Result isend(void* send_comm, void* data, int size, int tag, void* mhandle, void** request) noexcept {
  if (size < 0) return nccl::Result::kInvalidArgument;
  return isend(send_comm, data, static_cast<std::size_t>(size), tag, mhandle, nullptr, request);
}

// v9: the size is size_t. From v10 on there is a profiler handle, and isend of abi.h has the signature of the table.
nccl::Result isend(void* send_comm, void* data, std::size_t size, int tag, void* mhandle, void** request) noexcept {
  return isend(send_comm, data, size, tag, mhandle, nullptr, request);
}

// From v10 on.
nccl::Result irecv(void* recv_comm, int n, void** data, std::size_t* sizes, int* tags, void** mhandles,
                   void** profiler_handles, void** request) noexcept {
  RecvComm& comm = *static_cast<RecvComm*>(as_comm(recv_comm));
  if (comm.observed()) [[unlikely]] {
    return to_nccl(comm.irecv_observed(n, data, sizes, tags, mhandles, profiler_handles, request));
  }
  return to_nccl(comm.irecv(n, data, sizes, tags, mhandles, request));
}

// v9.
nccl::Result irecv(void* recv_comm, int n, void** data, std::size_t* sizes, int* tags, void** mhandles,
                   void** request) noexcept {
  return irecv(recv_comm, n, data, sizes, tags, mhandles, nullptr, request);
}

// Up to v8: the sizes are int, and there is no optional completion. A negative size becomes one that is too large.
nccl::Result irecv(void* recv_comm, int n, void** data, int* sizes, int* tags, void** mhandles,
                   void** request) noexcept {
  std::size_t wide[wire::kMaxGroup] = {};
  std::copy_n(sizes, std::clamp(n, 0, static_cast<int>(wire::kMaxGroup)), wide);
  *request = nullptr;
  return irecv(recv_comm, n, data, wide, tags, mhandles, request);
}

// Uses the upper ends of the ranges; -1 means that NCCL does not know the number.
template <typename CommAttr>
AnnouncedFlows announced_flows(const CommAttr& attributes, std::uint32_t operations) {
  return {.peers = static_cast<unsigned>(std::max(attributes.maxConcurrentPeers, 0)),
          .flows = static_cast<unsigned>(std::max(attributes.maxFlowsPerPeer, 0)),
          .collective = (operations & nccl::kNetCollectiveOperations) != 0 &&
                        (operations & nccl::kNetPointToPointOperations) == 0};
}

// From v11 on.
template <typename Attributes>
nccl::Result set_net_attr(void* context, Attributes* attributes) noexcept {
  if (attributes == nullptr) return nccl::Result::kInvalidArgument;
  return announce(context, {announced_flows(attributes->sendCommAttr, attributes->op),
                            announced_flows(attributes->recvCommAttr, attributes->op)});
}

// Members that are not set here are functions that this plugin does not offer: nullptr.
template <typename Net, int kVersion>
constexpr Net make_table() {
  Net table{};
  table.name = "Verbatim";
  table.init = init<kVersion>;
  table.devices = devices;
  table.getProperties = get_properties;
  table.listen = listen;
  table.connect = connect;
  table.accept = accept;
  table.regMr = reg_mr;
  table.regMrDmaBuf = reg_mr_dmabuf;
  table.deregMr = dereg_mr;
  table.isend = isend;
  table.irecv = irecv;
  table.iflush = iflush;
  table.test = test;
  table.closeSend = close_comm;
  table.closeRecv = close_comm;
  table.closeListen = close_listen;
  if constexpr (kVersion >= 9) table.makeVDevice = make_vdevice;
  if constexpr (kVersion >= 11) {
    table.finalize = finalize;
    table.setNetAttr = set_net_attr;
  }
  return table;
}

}  // namespace verbatim::abi

#pragma GCC visibility push(default)
extern "C" {
using verbatim::abi::make_table;

// The oldest version that this plugin supports: sizes are int.
extern constinit const nccl::v6::Net ncclNetPlugin_v6 = make_table<nccl::v6::Net, 6>();
// Handles for device offload.
extern constinit const nccl::v7::Net ncclNetPlugin_v7 = make_table<nccl::v7::Net, 7>();
// size_t for the size of a registration.
extern constinit const nccl::v8::Net ncclNetPlugin_v8 = make_table<nccl::v8::Net, 8>();
// size_t for the sizes of messages, virtual devices and limits.
extern constinit const nccl::v9::Net ncclNetPlugin_v9 = make_table<nccl::v9::Net, 9>();
// Profiler handles, and the communicator's settings in connect.
extern constinit const nccl::v10::Net ncclNetPlugin_v10 = make_table<nccl::v10::Net, 10>();
// A context for each communicator.
extern constinit const nccl::v11::Net ncclNetPlugin_v11 = make_table<nccl::v11::Net, 11>();
// Up to eight devices in a virtual device, rails and planes.
extern constinit const nccl::v12::Net ncclNetPlugin_v12 = make_table<nccl::v12::Net, 12>();
}
#pragma GCC visibility pop
