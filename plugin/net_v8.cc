// NCCL's net table, version 8: v7 with size_t for the size of a registration.
#include "nccl/net_v8.h"

#include "abi.h"

namespace verbatim::abi {
namespace {

nccl::Result get_properties_v8(int device, nccl::v8::NetProperties* properties) noexcept {
  DeviceProperties source{};
  if (const nccl::Result found = device_properties(device, source); found != nccl::Result::kSuccess) return found;
  fill_properties(source, *properties);
  fill_offload(*properties);
  properties->regIsGlobal = 1;
  return nccl::Result::kSuccess;
}

nccl::Result listen_v8(int device, void* handle, void** listen_comm) noexcept {
  return abi::listen(process_context(), device, handle, listen_comm);
}

nccl::Result connect_v8(int device, void* handle, void** send_comm, nccl::NetDeviceHandle**) noexcept {
  return abi::connect(process_context(), device, nccl::kNetTrafficClassUndefined, handle, send_comm);
}

}  // namespace
}  // namespace verbatim::abi

extern "C" __attribute__((visibility("default"))) const nccl::v8::Net ncclNetPlugin_v8;

const nccl::v8::Net ncclNetPlugin_v8 = {
    .name = verbatim::abi::kName,
    .init = verbatim::abi::init_process<8>,
    .devices = verbatim::abi::devices,
    .getProperties = verbatim::abi::get_properties_v8,
    .listen = verbatim::abi::listen_v8,
    .connect = verbatim::abi::connect_v8,
    .accept = verbatim::abi::accept_offload,
    .regMr = verbatim::abi::reg_mr,
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
