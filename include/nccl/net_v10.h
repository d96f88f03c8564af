// NCCL's net plugin interface, version 10: the table that a plugin exports as the data symbol ncclNetPlugin_v10.
// Restated from its documentation; sizes and offsets are those of x86-64.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nccl/types.h"

namespace nccl::v10 {

// A virtual device: the indices of the devices of which it consists.
struct NetVDeviceProps {
  int ndevs;
  int devs[4];
};
static_assert(sizeof(NetVDeviceProps) == 20 && alignof(NetVDeviceProps) == 4);
static_assert(offsetof(NetVDeviceProps, ndevs) == 0);
static_assert(offsetof(NetVDeviceProps, devs) == 4);

struct NetCommConfig {
  int trafficClass;  // kNetTrafficClassUndefined when the user set none
};
static_assert(sizeof(NetCommConfig) == 4 && alignof(NetCommConfig) == 4);

struct NetProperties {
  char* name;          // unique
  char* pciPath;       // real path in /sys, can be null
  std::uint64_t guid;  // of the NIC
  int ptrSupport;      // bits of PointerType
  int regIsGlobal;     // a registration can be used by all comms of the device
  int forceFlush;      // NCCL must call iflush after every receive into device memory
  int speed;           // Mbit/s
  int port;            // physical port, different for each port of one NIC
  float latency;       // us
  int maxComms;        // maximum number of comms on the device
  int maxRecvs;        // maximum number of members of a grouped receive
  NetDeviceType netDeviceType;
  int netDeviceVersion;
  NetVDeviceProps vProps;
  std::size_t maxP2pBytes;   // largest isend or irecv
  std::size_t maxCollBytes;  // largest collective offload, unused here
};
static_assert(sizeof(NetProperties) == 104 && alignof(NetProperties) == 8);
static_assert(offsetof(NetProperties, name) == 0);
static_assert(offsetof(NetProperties, pciPath) == 8);
static_assert(offsetof(NetProperties, guid) == 16);
static_assert(offsetof(NetProperties, ptrSupport) == 24);
static_assert(offsetof(NetProperties, regIsGlobal) == 28);
static_assert(offsetof(NetProperties, forceFlush) == 32);
static_assert(offsetof(NetProperties, speed) == 36);
static_assert(offsetof(NetProperties, port) == 40);
static_assert(offsetof(NetProperties, latency) == 44);
static_assert(offsetof(NetProperties, maxComms) == 48);
static_assert(offsetof(NetProperties, maxRecvs) == 52);
static_assert(offsetof(NetProperties, netDeviceType) == 56);
static_assert(offsetof(NetProperties, netDeviceVersion) == 60);
static_assert(offsetof(NetProperties, vProps) == 64);
static_assert(offsetof(NetProperties, maxP2pBytes) == 88);
static_assert(offsetof(NetProperties, maxCollBytes) == 96);

struct Net {
  const char* name;
  Result (*init)(DebugLogger logger, ProfilerCallback profiler);
  Result (*devices)(int* count);
  Result (*getProperties)(int device, NetProperties* properties);
  Result (*listen)(int device, void* handle, void** listen_comm);
  Result (*connect)(int device, NetCommConfig* config, void* handle, void** send_comm, NetDeviceHandle** device_handle);
  Result (*accept)(void* listen_comm, void** recv_comm, NetDeviceHandle** device_handle);
  Result (*regMr)(void* comm, void* data, std::size_t size, int type, void** mhandle);
  Result (*regMrDmaBuf)(void* comm, void* data, std::size_t size, int type, std::uint64_t offset, int fd,
                        void** mhandle);
  Result (*deregMr)(void* comm, void* mhandle);
  Result (*isend)(void* send_comm, void* data, std::size_t size, int tag, void* mhandle, void* profiler_handle,
                  void** request);
  Result (*irecv)(void* recv_comm, int n, void** data, std::size_t* sizes, int* tags, void** mhandles,
                  void** profiler_handles, void** request);
  Result (*iflush)(void* recv_comm, int n, void** data, int* sizes, void** mhandles, void** request);
  Result (*test)(void* request, int* done, int* sizes);
  Result (*closeSend)(void* send_comm);
  Result (*closeRecv)(void* recv_comm);
  Result (*closeListen)(void* listen_comm);
  Result (*getDeviceMr)(void* comm, void* mhandle, void** device_mhandle);
  Result (*irecvConsumed)(void* recv_comm, int n, void* request);
  Result (*makeVDevice)(int* device, NetVDeviceProps* properties);
};
static_assert(sizeof(Net) == 160);
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
static_assert(offsetof(Net, getDeviceMr) == 136);
static_assert(offsetof(Net, irecvConsumed) == 144);
static_assert(offsetof(Net, makeVDevice) == 152);

}  // namespace nccl::v10
