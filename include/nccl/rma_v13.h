// NCCL's RMA plugin interface, version 13: the table that a plugin exports as the data symbol ncclRmaPlugin_v13 or
// ncclGinPlugin_v13. In this version all ranks are spoken to, and every signal is a strong one.
// Restated from its documentation; sizes and offsets are those of x86-64.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nccl/net_v12.h"
#include "nccl/types.h"

namespace nccl::rma_v13 {

using NetProperties = v12::NetProperties;

struct RmaConfig {
  int nSignals;      // not for a plugin whose transfers CPU threads start
  int nCounters;     // the same
  int nContexts;     // independent sets of connections
  int queueDepth;    // the same as nSignals
  int trafficClass;  // negative when the user set none
};
static_assert(sizeof(RmaConfig) == 20 && alignof(RmaConfig) == 4);
static_assert(offsetof(RmaConfig, nSignals) == 0);
static_assert(offsetof(RmaConfig, nCounters) == 4);
static_assert(offsetof(RmaConfig, nContexts) == 8);
static_assert(offsetof(RmaConfig, queueDepth) == 12);
static_assert(offsetof(RmaConfig, trafficClass) == 16);

struct Rma {
  const char* name;
  Result (*init)(void** context, std::uint64_t comm_id, DebugLogger logger);
  Result (*devices)(int* count);
  Result (*getProperties)(int device, v12::NetProperties* properties);
  Result (*listen)(void* context, int device, void* handle, void** listen_comm);
  Result (*connect)(void* context, void* handles[], int nranks, int rank, void* listen_comm, void** coll_comm);
  Result (*createContext)(void* coll_comm, RmaConfig* config, void** rma_context, NetDeviceHandle** device_handle);
  Result (*regMrSym)(void* coll_comm, void* data, std::size_t size, int type, std::uint64_t flags, void** mhandle,
                     void** gin_handle);
  Result (*regMrSymDmaBuf)(void* coll_comm, void* data, std::size_t size, int type, std::uint64_t offset, int fd,
                           std::uint64_t flags, void** mhandle, void** gin_handle);
  Result (*deregMrSym)(void* coll_comm, void* mhandle);
  Result (*destroyContext)(void* rma_context);
  Result (*closeColl)(void* coll_comm);
  Result (*closeListen)(void* listen_comm);
  Result (*iput)(void* rma_context, int context, std::uint64_t source_offset, void* source_mhandle, std::size_t size,
                 std::uint64_t target_offset, void* target_mhandle, std::uint32_t rank, void** request);
  Result (*iputSignal)(void* rma_context, int context, std::uint64_t source_offset, void* source_mhandle,
                       std::size_t size, std::uint64_t target_offset, void* target_mhandle, std::uint32_t rank,
                       std::uint64_t signal_offset, void* signal_mhandle, std::uint64_t signal_value,
                       std::uint32_t signal_operation, void** request);
  Result (*iget)(void* rma_context, int context, std::uint64_t remote_offset, void* remote_mhandle, std::size_t size,
                 std::uint64_t local_offset, void* local_mhandle, std::uint32_t rank, void** request);
  Result (*iflush)(void* rma_context, int context, void* mhandle, std::uint32_t rank, void** request);
  Result (*test)(void* coll_comm, void* request, int* done);
  Result (*ginProgress)(void* rma_context);
  Result (*queryLastError)(void* rma_context, bool* has_error);
  Result (*finalize)(void* context);
};
static_assert(sizeof(Rma) == 168);
static_assert(offsetof(Rma, name) == 0);
static_assert(offsetof(Rma, init) == 8);
static_assert(offsetof(Rma, devices) == 16);
static_assert(offsetof(Rma, getProperties) == 24);
static_assert(offsetof(Rma, listen) == 32);
static_assert(offsetof(Rma, connect) == 40);
static_assert(offsetof(Rma, createContext) == 48);
static_assert(offsetof(Rma, regMrSym) == 56);
static_assert(offsetof(Rma, regMrSymDmaBuf) == 64);
static_assert(offsetof(Rma, deregMrSym) == 72);
static_assert(offsetof(Rma, destroyContext) == 80);
static_assert(offsetof(Rma, closeColl) == 88);
static_assert(offsetof(Rma, closeListen) == 96);
static_assert(offsetof(Rma, iput) == 104);
static_assert(offsetof(Rma, iputSignal) == 112);
static_assert(offsetof(Rma, iget) == 120);
static_assert(offsetof(Rma, iflush) == 128);
static_assert(offsetof(Rma, test) == 136);
static_assert(offsetof(Rma, ginProgress) == 144);
static_assert(offsetof(Rma, queryLastError) == 152);
static_assert(offsetof(Rma, finalize) == 160);

}  // namespace nccl::rma_v13
