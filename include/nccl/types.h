// The part of NCCL's net plugin interface that all versions share: results, logging, pointer types, the offload handle.
// Restated from NCCL's documentation; it has no addition by this project.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nccl {

enum class Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,  // a net plugin never returns it
  kTimeout = 8,
};
static_assert(sizeof(Result) == 4 && alignof(Result) == 4);

enum class DebugLogLevel : int { kNone = 0, kVersion = 1, kWarn = 2, kInfo = 3, kAbort = 4, kTrace = 5 };
static_assert(sizeof(DebugLogLevel) == 4);

// Bits of `flags` of a log line.
enum DebugLogSubsystem : unsigned long {
  kLogInit = 0x1,
  kLogNet = 0x10,
  kLogEnv = 0x80,
  kLogReg = 0x2000,
};

// For a warning, `file` is __FILE__. `format` is a printf format. NCCL truncates lines to 1,024 bytes.
using DebugLogger = void (*)(DebugLogLevel level, unsigned long flags, const char* file, int line, const char* format,
                             ...);
using ProfilerCallback = Result (*)(void** event_handle, int type, void* profiler_handle, std::int64_t plugin_id,
                                    void* extra);

// Bits of NetProperties::ptrSupport. The `type` of a registration is one of them.
enum PointerType : int { kPtrHost = 0x1, kPtrCuda = 0x2, kPtrDmaBuf = 0x4 };

// kGinProxy: the device of an RMA table, for which NCCL's CPU threads start the transfers of its device API.
enum class NetDeviceType : int { kHost = 0, kUnpack = 1, kGinProxy = 2 };
static_assert(sizeof(NetDeviceType) == 4);

constexpr std::size_t kNetHandleMaxBytes = 128;                 // size of the handle of listen and connect
constexpr int kNetMaxRequests = 32;                             // a comm has up to 32 * maxRecvs outstanding requests
constexpr std::size_t kMaxNetSizeBytes = std::size_t{1} << 40;  // largest legal maxP2pBytes
constexpr int kNetDeviceInvalidVersion = 0;                     // netDeviceVersion of a plugin without device offload
constexpr int kNetTrafficClassUndefined = -1;
constexpr std::int16_t kNetIdUndefined = -1;  // railId, planeId

// Bits of the flags of a registration in an RMA table.
constexpr std::uint64_t kMrForceStrictOrdering = 0x1;
constexpr std::uint64_t kMrSignalNeverReset = 0x2;

// What a signal of an RMA table does to the 64-bit word of the peer: adds 1, or adds the value of the call.
constexpr std::uint32_t kSignalIncrement = 0x1;
constexpr std::uint32_t kSignalAdd = 0x2;

// Bits of NetAttr::op: Broadcast 0, Reduce 1, AllGather 2, ReduceScatter 3, AllReduce 4, AllGatherV 11; SendRecv 5,
// Send 6, Recv 7, AlltoAll 8, Scatter 9, Gather 10, PutSignal 12, Signal 13, WaitSignal 14.
constexpr std::uint32_t kNetCollectiveOperations = 0x081f;
constexpr std::uint32_t kNetPointToPointOperations = 0x77e0;

// The value of `*request` in a call of irecv for an optional completion (v9 and later, for the protocols LL and LL128).
constexpr std::uintptr_t kNetOptionalRecvCompletion = 0x1;

// The device-offload handle of connect and accept (v7 and later). Plugins without device offload do not use it.
struct NetDeviceHandle {
  NetDeviceType netDeviceType;
  int netDeviceVersion;
  void* handle;
  std::size_t size;
  int needsProxyProgress;
};
static_assert(sizeof(NetDeviceHandle) == 32 && alignof(NetDeviceHandle) == 8);
static_assert(offsetof(NetDeviceHandle, netDeviceType) == 0 && offsetof(NetDeviceHandle, netDeviceVersion) == 4);
static_assert(offsetof(NetDeviceHandle, handle) == 8 && offsetof(NetDeviceHandle, size) == 16);
static_assert(offsetof(NetDeviceHandle, needsProxyProgress) == 24);

}  // namespace nccl
