// NCCL's net table, version 10: v9 with profiler handles, and the communicator's settings in connect.
#include "nccl/net_v10.h"

#include "abi.h"

namespace verbatim::abi {
namespace {

nccl::Result init_v10(nccl::DebugLogger logger, nccl::ProfilerCallback) noexcept {
  return init_process(10, logger);
}

nccl::Result get_properties_v10(int device, nccl::v10::NetProperties* properties) noexcept {
  DeviceProperties source{};
  if (const nccl::Result found = device_properties(device, source); found != nccl::Result::kSuccess) return found;
  fill_properties(source, *properties);
  fill_offload(*properties);
  fill_limits(device, *properties);
  return nccl::Result::kSuccess;
}

nccl::Result listen_v10(int device, void* handle, void** listen_comm) noexcept {
  return abi::listen(process_context(), device, handle, listen_comm);
}

nccl::Result connect_v10(int device, nccl::v10::NetCommConfig* config, void* handle, void** send_comm,
                         nccl::NetDeviceHandle**) noexcept {
  return abi::connect(process_context(), device,
                      config != nullptr ? config->trafficClass : nccl::kNetTrafficClassUndefined, handle, send_comm);
}

}  // namespace
}  // namespace verbatim::abi

extern "C" __attribute__((visibility("default"))) const nccl::v10::Net ncclNetPlugin_v10;

const nccl::v10::Net ncclNetPlugin_v10 = {
    .name = verbatim::abi::kName,
    .init = verbatim::abi::init_v10,
    .devices = verbatim::abi::devices,
    .getProperties = verbatim::abi::get_properties_v10,
    .listen = verbatim::abi::listen_v10,
    .connect = verbatim::abi::connect_v10,
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
};
