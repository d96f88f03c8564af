// NCCL's net table, version 7: v6 with handles for device offload, which this plugin does not set.
#include "nccl/net_v7.h"

#include "abi.h"

namespace verbatim::abi {
namespace {

nccl::Result get_properties_v7(int device, nccl::v7::NetProperties* properties) noexcept {
  DeviceProperties source{};
  if (const nccl::Result found = device_properties(device, source); found != nccl::Result::kSuccess) return found;
  fill_properties(source, *properties);
  fill_offload(*properties);
  return nccl::Result::kSuccess;
}

nccl::Result listen_v7(int device, void* handle, void** listen_comm) noexcept {
  return abi::listen(process_context(), device, handle, listen_comm);
}

nccl::Result connect_v7(int device, void* handle, void** send_comm, nccl::NetDeviceHandle**) noexcept {
  return abi::connect(process_context(), device, nccl::kNetTrafficClassUndefined, handle, send_comm);
}

}  // namespace
}  // namespace verbatim::abi

extern "C" __attribute__((visibility("default"))) const nccl::v7::Net ncclNetPlugin_v7;

const nccl::v7::Net ncclNetPlugin_v7 = {
    .name = verbatim::abi::kName,
    .init = verbatim::abi::init_process<7>,
    .devices = verbatim::abi::devices,
    .getProperties = verbatim::abi::get_properties_v7,
    .listen = verbatim::abi::listen_v7,
    .connect = verbatim::abi::connect_v7,
    .accept = verbatim::abi::accept_offload,
    .regMr = verbatim::abi::reg_mr_int,
    .regMrDmaBuf = verbatim::abi::reg_mr_dmabuf,
    .deregMr = verbatim::abi::dereg_mr,
    .isend = verbatim::abi::isend_int,
    .irecv = verbatim::abi::irecv<int>,
    .iflush = verbatim::abi::iflush,
    .test = verbatim::abi::test,
    .closeSend = verbatim::abi::close_comm,
    .closeRecv = verbatim::abi::close_comm,
    .closeListen = verbatim::abi::close_listen,
    .getDeviceMr = nullptr,
    .irecvConsumed = nullptr,
};
