// NCCL's net table, version 12: v11 with up to eight devices in a virtual device, rails and planes.
#include "nccl/net_v12.h"

#include "abi.h"

namespace verbatim::abi {
namespace {

nccl::Result init_v12(void** context, std::uint64_t, nccl::v12::NetCommConfig* config, nccl::DebugLogger logger,
                      nccl::ProfilerCallback) noexcept {
  return abi::init(12, context, config != nullptr ? config->trafficClass : nccl::kNetTrafficClassUndefined, logger);
}

nccl::Result get_properties_v12(int device, nccl::v12::NetProperties* properties) noexcept {
  DeviceProperties source{};
  if (const nccl::Result found = device_properties(device, source); found != nccl::Result::kSuccess) return found;
  fill_properties(source, *properties);
  fill_offload(*properties);
  fill_limits(device, *properties);
  properties->maxMultiRequestSize = 1;
  properties->railId = static_cast<std::int16_t>(source.port.rail_id);
  properties->planeId = static_cast<std::int16_t>(source.port.plane_id);
  return nccl::Result::kSuccess;
}

nccl::Result connect_v12(void* context, int device, void* handle, void** send_comm, nccl::NetDeviceHandle**) noexcept {
  return abi::connect(context, device, nccl::kNetTrafficClassUndefined, handle, send_comm);
}

}  // namespace
}  // namespace verbatim::abi

extern "C" __attribute__((visibility("default"))) const nccl::v12::Net ncclNetPlugin_v12;

const nccl::v12::Net ncclNetPlugin_v12 = {
    .name = verbatim::abi::kName,
    .init = verbatim::abi::init_v12,
    .devices = verbatim::abi::devices,
    .getProperties = verbatim::abi::get_properties_v12,
    .listen = verbatim::abi::listen,
    .connect = verbatim::abi::connect_v12,
    .accept = verbatim::abi::accept_offload,
    .regMr = verbatim::abi::reg_mr,
    .regMrDmaBuf = verbatim::abi::reg_mr_dmabuf,
    .deregMr = verbatim::abi::dereg_mr,
    .isend = verbatim::abi::isend_profiled,
    .irecv = verbatim::abi::irecv_profiled,
    .iflush = verbatim::abi::iflush,
    .test = verbatim::abi::test,
    .closeSend = verbatim::abi::close_comm,
    .closeRecv = verbatim::abi::close_comm,
    .closeListen = verbatim::abi::close_listen,
    .getDeviceMr = nullptr,
    .irecvConsumed = nullptr,
    .makeVDevice = nullptr,
    .finalize = verbatim::abi::finalize,
    .setNetAttr = verbatim::abi::set_net_attr,
};
