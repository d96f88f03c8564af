// NCCL's net table, version 7: v6 and device handles, which a host plugin leaves alone.
#include "nccl/net_v7.h"

#include "abi.h"

namespace verbatim::abi {
namespace {

nccl::Result get_properties_v7(int device, nccl::v7::NetProperties* properties) noexcept {
  DeviceView view{};
  if (const nccl::Result found = device_view(device, view); found != nccl::Result::kSuccess) return found;
  fill_properties(view, *properties);
  fill_offload(*properties);
  return nccl::Result::kSuccess;
}

nccl::Result listen_v7(int device, void* handle, void** listen_comm) noexcept {
  return abi::listen(process_context(), device, handle, listen_comm);
}

nccl::Result connect_v7(int device, void* handle, void** send_comm, nccl::NetDeviceHandle**) noexcept {
  return abi::connect(process_context(), device, nccl::kNetTrafficClassUndefined, handle, send_comm);
}

nccl::Result accept_v7(void* listen_comm, void** recv_comm, nccl::NetDeviceHandle**) noexcept {
  return abi::accept(listen_comm, recv_comm);
}

nccl::Result reg_mr_v7(void* comm, void* data, int size, int type, void** mhandle) noexcept {
  std::size_t wide = 0;
  return widen(size, wide) ? abi::reg_mr(comm, data, wide, type, mhandle) : nccl::Result::kInvalidArgument;
}

nccl::Result isend_v7(void* send_comm, void* data, int size, int tag, void* mhandle, void** request) noexcept {
  std::size_t wide = 0;
  return widen(size, wide) ? abi::isend(send_comm, data, wide, tag, mhandle, request) : nccl::Result::kInvalidArgument;
}

}  // namespace
}  // namespace verbatim::abi

extern "C" __attribute__((visibility("default"))) const nccl::v7::Net ncclNetPlugin_v7;

const nccl::v7::Net ncclNetPlugin_v7 = {
    .name = verbatim::abi::kName,
    .init = verbatim::abi::init_process,
    .devices = verbatim::abi::devices,
    .getProperties = verbatim::abi::get_properties_v7,
    .listen = verbatim::abi::listen_v7,
    .connect = verbatim::abi::connect_v7,
    .accept = verbatim::abi::accept_v7,
    .regMr = verbatim::abi::reg_mr_v7,
    .regMrDmaBuf = verbatim::abi::reg_mr_dmabuf,
    .deregMr = verbatim::abi::dereg_mr,
    .isend = verbatim::abi::isend_v7,
    .irecv = verbatim::abi::irecv<int>,
    .iflush = verbatim::abi::iflush,
    .test = verbatim::abi::test,
    .closeSend = verbatim::abi::close_comm,
    .closeRecv = verbatim::abi::close_comm,
    .closeListen = verbatim::abi::close_listen,
    .getDeviceMr = nullptr,
    .irecvConsumed = nullptr,
};
