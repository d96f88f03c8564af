// NCCL's net table, version 9: v8 with size_t for the sizes of messages, virtual devices and limits.
#include "nccl/net_v9.h"

#include "abi.h"

namespace verbatim::abi {
namespace {

nccl::Result get_properties_v9(int device, nccl::v9::NetProperties* properties) noexcept {
  DeviceProperties source{};
  if (const nccl::Result found = device_properties(device, source); found != nccl::Result::kSuccess) return found;
  fill_properties(source, *properties);
  fill_offload(*properties);
  fill_limits(device, *properties);
  return nccl::Result::kSuccess;
}

nccl::Result listen_v9(int device, void* handle, void** listen_comm) noexcept {
  return abi::listen(process_context(), device, handle, listen_comm);
}

nccl::Result connect_v9(int device, void* handle, void** send_comm, nccl::NetDeviceHandle**) noexcept {
  return abi::connect(process_context(), device, nccl::kNetTrafficClassUndefined, handle, send_comm);
}

}  // namespace
}  // namespace verbatim::abi

extern "C" __attribute__((visibility("default"))) const nccl::v9::Net ncclNetPlugin_v9;

const nccl::v9::Net ncclNetPlugin_v9 = {
    .name = verbatim::abi::kName,
    .init = verbatim::abi::init_process<9>,
    .devices = verbatim::abi::devices,
    .getProperties = verbatim::abi::get_properties_v9,
    .listen = verbatim::abi::listen_v9,
    .connect = verbatim::abi::connect_v9,
    .accept = verbatim::abi::accept_offload,
    .regMr = verbatim::abi::reg_mr,
    .regMrDmaBuf = verbatim::abi::reg_mr_dmabuf,
    .deregMr = verbatim::abi::dereg_mr,
    .isend = verbatim::abi::isend,
    .irecv = verbatim::abi::irecv<std::size_t>,
    .iflush = verbatim::abi::iflush,
    .test = verbatim::abi::test,
    .closeSend = verbatim::abi::close_comm,
    .closeRecv = verbatim::abi::close_comm,
    .closeListen = verbatim::abi::close_listen,
    .getDeviceMr = nullptr,
    .irecvConsumed = nullptr,
    .makeVDevice = nullptr,
};
