// NCCL's net plugin interface, version 6: the table that a plugin exports as the data symbol ncclNetPlugin_v6.
// Restated from its documentation; sizes and offsets are those of x86-64.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nccl/types.h"

namespace nccl::v6 {

struct NetProperties {
  char* name;          // unique
  char* pciPath;       // real path in /sys, can be null
  std::uint64_t guid;  // of the NIC
  int ptrSupport;      // bits of PointerType
  int speed;           // Mbit/s
  int port;            // physical port, different for each port of one NIC
  float latency;       // us
  int maxComms;        // maximum number of comms on the device
  int maxRecvs;        // maximum number of members of a grouped receive
};
static_assert(sizeof(NetProperties) == 48 && alignof(NetProperties) == 8);
static_assert(offsetof(NetProperties, name) == 0);
static_assert(offsetof(NetProperties, pciPath) == 8);
static_assert(offsetof(NetProperties, guid) == 16);
static_assert(offsetof(NetProperties, ptrSupport) == 24);
static_assert(offsetof(NetProperties, speed) == 28);
static_assert(offsetof(NetProperties, port) == 32);
static_assert(offsetof(NetProperties, latency) == 36);
static_assert(offsetof(NetProperties, maxComms) == 40);
static_assert(offsetof(NetProperties, maxRecvs) == 44);

struct Net {
  const char* name;
  Result (*init)(DebugLogger logger);
  Result (*devices)(int* count);
  Result (*getProperties)(int device, NetProperties* properties);
  Result (*listen)(int device, void* handle, void** listen_comm);
  Result (*connect)(int device, void* handle, void** send_comm);
  Result (*accept)(void* listen_comm, void** recv_comm);
  Result (*regMr)(void* comm, void* data, int size, int type, void** mhandle);
  Result (*regMrDmaBuf)(void* comm, void* data, std::size_t size, int type, std::uint64_t offset, int fd,
                        void** mhandle);
  Result (*deregMr)(void* comm, void* mhandle);
  Result (*isend)(void* send_comm, void* data, int size, int tag, void* mhandle, void** request);
  Result (*irecv)(void* recv_comm, int n, void** data, int* sizes, int* tags, void** mhandles, void** request);
  Result (*iflush)(void* recv_comm, int n, void** data, int* sizes, void** mhandles, void** request);
  Result (*test)(void* request, int* done, int* sizes);
  Result (*closeSend)(void* send_comm);
  Result (*closeRecv)(void* recv_comm);
  Result (*closeListen)(void* listen_comm);
};
static_assert(sizeof(Net) == 136);
static_assert(offsetof(Net, name) == 0);
static_assert(offsetof(Net, init) == 8);
static_assert(offsetof(Net, devices) == 16);
static_assert(offsetof(Net, getProperties) == 24);
static_assert(offsetof(Net, listen) == 32);
static_assert(offsetof(Net, connect) == 40);
static_assert(offsetof(Net, accept) == 48);
static_assert(offsetof(Net, regMr) == 56);
static_assert(offsetof(Net, regMrDmaBuf) == 64);
static_assert(offsetof(Net, deregMr) == 72);
static_assert(offsetof(Net, isend) == 80);
static_assert(offsetof(Net, irecv) == 88);
static_assert(offsetof(Net, iflush) == 96);
static_assert(offsetof(Net, test) == 104);
static_assert(offsetof(Net, closeSend) == 112);
static_assert(offsetof(Net, closeRecv) == 120);
static_assert(offsetof(Net, closeListen) == 128);

}  // namespace nccl::v6
