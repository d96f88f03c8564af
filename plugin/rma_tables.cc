// NCCL's RMA tables, versions 13 and 14. Functions here with the same name have the signatures of different versions:
// the type of the table's member selects one of them.
#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>

#include "abi.h"
#include "nccl/rma_v13.h"
#include "nccl/rma_v14.h"
#include "rma_abi.h"

namespace verbatim::abi {

template <int kVersion>
nccl::Result rma_init(void** context, std::uint64_t, nccl::DebugLogger logger) noexcept {
  return rma_init(kVersion, context, logger);
}

// NCCL takes the type of its device API from here, also in v14.
nccl::Result rma_properties(int device, nccl::v12::NetProperties* properties) noexcept {
  int devices = 0;
  if (const nccl::Result counted = rma_devices(&devices); counted != nccl::Result::kSuccess) return counted;
  if (device >= devices) return nccl::Result::kInvalidArgument;
  const nccl::Result found = get_properties_v12(device, properties);
  if (found == nccl::Result::kSuccess) properties->netDeviceType = nccl::NetDeviceType::kGinProxy;
  return found;
}

nccl::Result rma_create(void* coll_comm, nccl::rma_v13::RmaConfig* config, void** rma_context,
                        nccl::NetDeviceHandle** device_handle) noexcept {
  if (device_handle != nullptr) *device_handle = nullptr;  // of GPU-initiated transfers
  return rma_create_context(coll_comm, {.contexts = config->nContexts, .traffic_class = config->trafficClass},
                            rma_context);
}

nccl::Result rma_create(void* coll_comm, nccl::rma_v14::RmaConfig* config, void** rma_context) noexcept {
  return rma_create_context(
      coll_comm,
      {.contexts = config->nContexts, .traffic_class = config->trafficClass, .rank_stride = config->rankStride},
      rma_context);
}

// v13: a second handle, for GPU-initiated transfers.
nccl::Result rma_reg_mr(void* coll_comm, void* data, std::size_t size, int type, std::uint64_t flags, void** mhandle,
                        void** gin_handle) noexcept {
  const nccl::Result registered = rma_reg_mr(coll_comm, data, size, type, flags, mhandle);
  if (gin_handle != nullptr) *gin_handle = *mhandle;
  return registered;
}

nccl::Result rma_reg_mr_dmabuf(void* coll_comm, void* data, std::size_t size, int type, std::uint64_t offset, int fd,
                               std::uint64_t flags, void** mhandle, void** gin_handle) noexcept {
  const nccl::Result registered = rma_reg_mr_dmabuf(coll_comm, data, size, type, offset, fd, flags, mhandle);
  if (gin_handle != nullptr) *gin_handle = *mhandle;
  return registered;
}

// v14 says whether a signal must be a strong one; all are.
nccl::Result rma_iput_signal(void* rma_context, int context, std::uint64_t source_offset, void* source_mhandle,
                             std::size_t size, std::uint64_t target_offset, void* target_mhandle, std::uint32_t rank,
                             std::uint64_t signal_offset, void* signal_mhandle, std::uint64_t signal_value,
                             std::uint32_t signal_operation, bool, void** request) noexcept {
  return rma_iput_signal(rma_context, context, source_offset, source_mhandle, size, target_offset, target_mhandle, rank,
                         signal_offset, signal_mhandle, signal_value, signal_operation, request);
}

template <typename Rma, int kVersion>
constexpr Rma make_rma_table() {
  Rma table{};
  table.name = "Verbatim";
  table.init = rma_init<kVersion>;
  table.devices = rma_devices;
  table.getProperties = rma_properties;
  table.listen = rma_listen;
  table.connect = rma_connect;
  table.createContext = rma_create;
  table.regMrSym = rma_reg_mr;
  table.regMrSymDmaBuf = rma_reg_mr_dmabuf;
  table.deregMrSym = rma_dereg_mr;
  table.destroyContext = rma_destroy_context;
  table.closeColl = rma_close_coll;
  table.closeListen = rma_close_listen;
  table.iput = rma_iput;
  table.iputSignal = rma_iput_signal;
  table.iget = rma_iget;
  table.iflush = rma_iflush;
  table.test = rma_test;
  if constexpr (kVersion == 13) {
    table.ginProgress = rma_progress;
  } else {
    table.rmaProgress = rma_progress;
  }
  table.queryLastError = rma_query_last_error;
  table.finalize = rma_finalize;
  return table;
}

}  // namespace verbatim::abi

#pragma GCC visibility push(default)
extern "C" {
using verbatim::abi::make_rma_table;

extern constinit const nccl::rma_v13::Rma ncclRmaPlugin_v13 = make_rma_table<nccl::rma_v13::Rma, 13>();
extern constinit const nccl::rma_v14::Rma ncclRmaPlugin_v14 = make_rma_table<nccl::rma_v14::Rma, 14>();
// NCCL 2.30.4 looks for v13 by this name only.
extern constinit const nccl::rma_v13::Rma ncclGinPlugin_v13 = make_rma_table<nccl::rma_v13::Rma, 13>();
}
#pragma GCC visibility pop
