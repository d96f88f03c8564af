// NCCL's net table, version 6, the oldest that this plugin supports: no device handles, sizes are int.
#include "nccl/net_v6.h"

#include "abi.h"

namespace verbatim::abi {
namespace {

nccl::Result get_properties_v6(int device, nccl::v6::NetProperties* properties) noexcept {
  DeviceProperties source{};
  if (const nccl::Result found = device_properties(device, source); found != nccl::Result::kSuccess) return found;
  fill_properties(source, *properties);
  return nccl::Result::kSuccess;
}

nccl::Result listen_v6(int device, void* handle, void** listen_comm) noexcept {
  return abi::listen(process_context(), device, handle, listen_comm);
}

nccl::Result connect_v6(int device, void* handle, void** send_comm) noexcept {
  return abi::connect(process_context(), device, nccl::kNetTrafficClassUndefined, handle, send_comm);
}

}  // namespace
}  // namespace verbatim::abi

extern "C" __attribute__((visibility("default"))) const nccl::v6::Net ncclNetPlugin_v6;

const nccl::v6::Net ncclNetPlugin_v6 = {
    .name = verbatim::abi::kName,
    .init = verbatim::abi::init_process<6>,
    .devices = verbatim::abi::devices,
    .getProperties = verbatim::abi::get_properties_v6,
    .listen = verbatim::abi::listen_v6,
    .connect = verbatim::abi::connect_v6,
    .accept = verbatim::abi::accept,
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
};
