// Compares include/nccl with NCCL's own plugin headers: all slots of the tables and all fields of the structures.
// Built only with -Dnccl_headers=DIR, the directory with NCCL's net.h and net_v6.h to net_v12.h. Those of RMA are
// compared if DIR is in NCCL's source tree (plugins/net/example/nccl), which has rma_v14.h in src/include/plugin.
#include <gtest/gtest.h>
// NCCL's headers are C headers and need these two before them.
#include <stdint.h>
#include <stdlib.h>

#include <cstddef>
#include <type_traits>

#include "nccl/net_v10.h"
#include "nccl/net_v11.h"
#include "nccl/net_v12.h"
#include "nccl/net_v6.h"
#include "nccl/net_v7.h"
#include "nccl/net_v8.h"
#include "nccl/net_v9.h"
#include "nccl/rma_v13.h"
#include "nccl/rma_v14.h"
#include "net.h"
#ifdef HAS_NCCL_RMA_HEADERS
#include "gin/gin_v13.h"
#include "rma/rma_v13.h"
#include "rma/rma_v14.h"
#endif

namespace {

// Whether a type of NCCL and a type of include/nccl correspond. Equal types correspond; structures and enums that are
// listed below with CORRESPONDS, if size and alignment are equal; pointers, arrays and functions, if all their parts
// correspond.
template <typename Theirs, typename Ours>
constexpr bool kCorresponds = std::is_same_v<Theirs, Ours>;
template <typename Theirs, typename Ours>
constexpr bool kCorresponds<Theirs*, Ours*> = kCorresponds<Theirs, Ours>;
template <typename Theirs, typename Ours, std::size_t N>
constexpr bool kCorresponds<Theirs[N], Ours[N]> = kCorresponds<Theirs, Ours>;
template <typename TheirResult, typename... Theirs, typename OurResult, typename... Ours>
requires(sizeof...(Theirs) == sizeof...(Ours)) constexpr bool kCorresponds<TheirResult(Theirs...), OurResult(Ours...)> =
    kCorresponds<TheirResult, OurResult> && (kCorresponds<Theirs, Ours> && ...);
template <typename TheirResult, typename... Theirs, typename OurResult, typename... Ours>
requires(sizeof...(Theirs) ==
         sizeof...(Ours)) constexpr bool kCorresponds<TheirResult(Theirs..., ...), OurResult(Ours..., ...)> =
    kCorresponds<TheirResult, OurResult> && (kCorresponds<Theirs, Ours> && ...);

#define CORRESPONDS(theirs, ours) \
  template <>                     \
  constexpr bool kCorresponds<theirs, ours> = sizeof(theirs) == sizeof(ours) && alignof(theirs) == alignof(ours)

CORRESPONDS(ncclResult_t, nccl::Result);
CORRESPONDS(ncclDebugLogLevel, nccl::DebugLogLevel);
CORRESPONDS(ncclNetDeviceType, nccl::NetDeviceType);
CORRESPONDS(ncclNetDeviceHandle_v12_t, nccl::NetDeviceHandle);
CORRESPONDS(ncclNetProperties_v6_t, nccl::v6::NetProperties);
CORRESPONDS(ncclNetProperties_v7_t, nccl::v7::NetProperties);
CORRESPONDS(ncclNetProperties_v8_t, nccl::v8::NetProperties);
CORRESPONDS(ncclNetProperties_v9_t, nccl::v9::NetProperties);
CORRESPONDS(ncclNetProperties_v10_t, nccl::v10::NetProperties);
CORRESPONDS(ncclNetProperties_v11_t, nccl::v11::NetProperties);
CORRESPONDS(ncclNetProperties_v12_t, nccl::v12::NetProperties);
CORRESPONDS(ncclNetVDeviceProps_v9_t, nccl::v9::NetVDeviceProps);
CORRESPONDS(ncclNetVDeviceProps_v10_t, nccl::v10::NetVDeviceProps);
CORRESPONDS(ncclNetVDeviceProps_v11_t, nccl::v11::NetVDeviceProps);
CORRESPONDS(ncclNetVDeviceProps_v12_t, nccl::v12::NetVDeviceProps);
CORRESPONDS(ncclNetCommConfig_v10_t, nccl::v10::NetCommConfig);
CORRESPONDS(ncclNetCommConfig_v11_t, nccl::v11::NetCommConfig);
CORRESPONDS(ncclNetCommConfig_v12_t, nccl::v12::NetCommConfig);
CORRESPONDS(ncclNetCommAttr_v11_t, nccl::v11::NetCommAttr);
CORRESPONDS(ncclNetCommAttr_v12_t, nccl::v12::NetCommAttr);
CORRESPONDS(ncclNetAttr_v11_t, nccl::v11::NetAttr);
CORRESPONDS(ncclNetAttr_v12_t, nccl::v12::NetAttr);
#ifdef HAS_NCCL_RMA_HEADERS
CORRESPONDS(ncclGinConfig_v13_t, nccl::rma_v13::RmaConfig);
CORRESPONDS(ncclRmaConfig_v14_t, nccl::rma_v14::RmaConfig);
#endif

// Tests of kCorresponds itself.
static_assert(kCorresponds<ncclResult_t (*)(void*, size_t), nccl::Result (*)(void*, std::size_t)>);
static_assert(!kCorresponds<ncclResult_t (*)(void*, size_t), nccl::Result (*)(void*, int)>);
static_assert(!kCorresponds<ncclResult_t (*)(void*, int), nccl::Result (*)(void*)>);
static_assert(!kCorresponds<ncclResult_t (*)(void**), nccl::Result (*)(void*)>);
static_assert(!kCorresponds<ncclResult_t (*)(int, ...), nccl::Result (*)(int)>);
static_assert(!kCorresponds<ncclNetProperties_v11_t*, nccl::v12::NetProperties*>);

#define FIELD(theirs, ours, field)                                                        \
  EXPECT_EQ(offsetof(theirs, field), offsetof(ours, field)) << #theirs << "::" << #field; \
  EXPECT_EQ(sizeof(theirs::field), sizeof(ours::field)) << #theirs << "::" << #field;     \
  EXPECT_TRUE((kCorresponds<decltype(theirs::field), decltype(ours::field)>)) << #theirs << "::" << #field;

// `list` has all fields in order. If a slot were missing in the list of a table, the size would differ.
#define COUNT(theirs, ours, field) +1
#define TABLE(list, theirs, ours)                     \
  list(FIELD, theirs, ours);                          \
  EXPECT_EQ(sizeof(theirs), sizeof(ours)) << #theirs; \
  EXPECT_EQ(sizeof(theirs), sizeof(void*) * (0 list(COUNT, theirs, ours))) << #theirs
#define STRUCTURE(list, theirs, ours)                 \
  list(FIELD, theirs, ours);                          \
  EXPECT_EQ(sizeof(theirs), sizeof(ours)) << #theirs; \
  EXPECT_EQ(alignof(theirs), alignof(ours)) << #theirs

// clang-format would format these lists as code, each time differently.
// clang-format off
#define TABLE_V6(X, t, o) \
  X(t, o, name) X(t, o, init) X(t, o, devices) X(t, o, getProperties) X(t, o, listen) X(t, o, connect) \
  X(t, o, accept) X(t, o, regMr) X(t, o, regMrDmaBuf) X(t, o, deregMr) X(t, o, isend) X(t, o, irecv) \
  X(t, o, iflush) X(t, o, test) X(t, o, closeSend) X(t, o, closeRecv) X(t, o, closeListen)
#define TABLE_V7(X, t, o) TABLE_V6(X, t, o) X(t, o, getDeviceMr) X(t, o, irecvConsumed)
#define TABLE_V9(X, t, o) TABLE_V7(X, t, o) X(t, o, makeVDevice)
#define TABLE_V11(X, t, o) TABLE_V9(X, t, o) X(t, o, finalize) X(t, o, setNetAttr)

#define PROPERTIES_V6(X, t, o) \
  X(t, o, name) X(t, o, pciPath) X(t, o, guid) X(t, o, ptrSupport) X(t, o, speed) X(t, o, port) \
  X(t, o, latency) X(t, o, maxComms) X(t, o, maxRecvs)
#define PROPERTIES_V7(X, t, o) PROPERTIES_V6(X, t, o) X(t, o, netDeviceType) X(t, o, netDeviceVersion)
#define PROPERTIES_V8(X, t, o) PROPERTIES_V7(X, t, o) X(t, o, regIsGlobal)
#define PROPERTIES_V9(X, t, o) \
  PROPERTIES_V8(X, t, o) X(t, o, forceFlush) X(t, o, vProps) X(t, o, maxP2pBytes) X(t, o, maxCollBytes)
#define PROPERTIES_V11(X, t, o) PROPERTIES_V9(X, t, o) X(t, o, maxMultiRequestSize)
#define PROPERTIES_V12(X, t, o) PROPERTIES_V11(X, t, o) X(t, o, railId) X(t, o, planeId)

#define VDEVICE(X, t, o) X(t, o, ndevs) X(t, o, devs)
#define CONFIG(X, t, o) X(t, o, trafficClass)
#define COMM_ATTR(X, t, o) \
  X(t, o, maxConcurrentPeers) X(t, o, minConcurrentPeers) X(t, o, maxFlowsPerPeer) X(t, o, minFlowsPerPeer)
#define ATTR(X, t, o) X(t, o, sendCommAttr) X(t, o, recvCommAttr) X(t, o, op) X(t, o, algo) X(t, o, proto)
#define DEVICE_HANDLE(X, t, o) \
  X(t, o, netDeviceType) X(t, o, netDeviceVersion) X(t, o, handle) X(t, o, size) X(t, o, needsProxyProgress)

#define RMA_BEGIN(X, t, o) \
  X(t, o, name) X(t, o, init) X(t, o, devices) X(t, o, getProperties) X(t, o, listen) X(t, o, connect) \
  X(t, o, createContext) X(t, o, regMrSym) X(t, o, regMrSymDmaBuf) X(t, o, deregMrSym) X(t, o, destroyContext) \
  X(t, o, closeColl) X(t, o, closeListen) X(t, o, iput) X(t, o, iputSignal) X(t, o, iget) X(t, o, iflush) X(t, o, test)
#define RMA_END(X, t, o) X(t, o, queryLastError) X(t, o, finalize)
#define RMA_TABLE_V13(X, t, o) RMA_BEGIN(X, t, o) X(t, o, ginProgress) RMA_END(X, t, o)
#define RMA_TABLE_V14(X, t, o) RMA_BEGIN(X, t, o) X(t, o, rmaProgress) RMA_END(X, t, o)
#define RMA_CONFIG_V13(X, t, o) \
  X(t, o, nSignals) X(t, o, nCounters) X(t, o, nContexts) X(t, o, queueDepth) X(t, o, trafficClass)
#define RMA_CONFIG_V14(X, t, o) X(t, o, nContexts) X(t, o, trafficClass) X(t, o, rankStride)
// clang-format on

TEST(NcclHeaders, SharedTypes_MatchNccl) {
  STRUCTURE(DEVICE_HANDLE, ncclNetDeviceHandle_v7_t, nccl::NetDeviceHandle);
  EXPECT_TRUE((kCorresponds<ncclDebugLogger_t, nccl::DebugLogger>));
  EXPECT_TRUE((kCorresponds<ncclProfilerCallback_t, nccl::ProfilerCallback>));
  // include/nccl has one device handle type for all versions, so the types of NCCL's versions must be equal.
  EXPECT_TRUE((std::is_same_v<ncclNetDeviceHandle_v7_t, ncclNetDeviceHandle_v12_t>));
}

TEST(NcclHeaders, Constants_MatchNccl) {
  EXPECT_EQ(NCCL_NET_HANDLE_MAXSIZE, nccl::kNetHandleMaxBytes);
  EXPECT_EQ(NCCL_NET_MAX_REQUESTS, nccl::kNetMaxRequests);
  EXPECT_EQ(std::size_t{NCCL_MAX_NET_SIZE_BYTES}, nccl::kMaxNetSizeBytes);
  EXPECT_EQ(NCCL_NET_DEVICE_INVALID_VERSION, nccl::kNetDeviceInvalidVersion);
  EXPECT_EQ(NCCL_NET_TRAFFIC_CLASS_UNDEF, nccl::kNetTrafficClassUndefined);
  EXPECT_EQ(NCCL_NET_OPTIONAL_RECV_COMPLETION, nccl::kNetOptionalRecvCompletion);
#ifdef NCCL_NET_ID_UNDEF
  EXPECT_EQ(NCCL_NET_ID_UNDEF, nccl::kNetIdUndefined);
#endif
  EXPECT_EQ(NCCL_PTR_HOST, int{nccl::kPtrHost});
  EXPECT_EQ(NCCL_PTR_CUDA, int{nccl::kPtrCuda});
  EXPECT_EQ(NCCL_PTR_DMABUF, int{nccl::kPtrDmaBuf});
  EXPECT_EQ(NCCL_NET_DEVICE_HOST, static_cast<int>(nccl::NetDeviceType::kHost));
  EXPECT_EQ(NCCL_NET_DEVICE_UNPACK, static_cast<int>(nccl::NetDeviceType::kUnpack));
  EXPECT_EQ(ncclSuccess, static_cast<int>(nccl::Result::kSuccess));
  EXPECT_EQ(ncclUnhandledCudaError, static_cast<int>(nccl::Result::kUnhandledCudaError));
  EXPECT_EQ(ncclSystemError, static_cast<int>(nccl::Result::kSystemError));
  EXPECT_EQ(ncclInternalError, static_cast<int>(nccl::Result::kInternalError));
  EXPECT_EQ(ncclInvalidArgument, static_cast<int>(nccl::Result::kInvalidArgument));
  EXPECT_EQ(ncclInvalidUsage, static_cast<int>(nccl::Result::kInvalidUsage));
  EXPECT_EQ(ncclRemoteError, static_cast<int>(nccl::Result::kRemoteError));
  EXPECT_EQ(NCCL_LOG_NONE, static_cast<int>(nccl::DebugLogLevel::kNone));
  EXPECT_EQ(NCCL_LOG_VERSION, static_cast<int>(nccl::DebugLogLevel::kVersion));
  EXPECT_EQ(NCCL_LOG_WARN, static_cast<int>(nccl::DebugLogLevel::kWarn));
  EXPECT_EQ(NCCL_LOG_INFO, static_cast<int>(nccl::DebugLogLevel::kInfo));
  EXPECT_EQ(NCCL_LOG_ABORT, static_cast<int>(nccl::DebugLogLevel::kAbort));
  EXPECT_EQ(NCCL_LOG_TRACE, static_cast<int>(nccl::DebugLogLevel::kTrace));
  EXPECT_EQ(NCCL_INIT, static_cast<int>(nccl::kLogInit));
  EXPECT_EQ(NCCL_NET, static_cast<int>(nccl::kLogNet));
  EXPECT_EQ(NCCL_ENV, static_cast<int>(nccl::kLogEnv));
  EXPECT_EQ(NCCL_REG, static_cast<int>(nccl::kLogReg));
}

TEST(NcclHeaders, V6_MatchesNccl) {
  STRUCTURE(PROPERTIES_V6, ncclNetProperties_v6_t, nccl::v6::NetProperties);
  TABLE(TABLE_V6, ncclNet_v6_t, nccl::v6::Net);
}

TEST(NcclHeaders, V7_MatchesNccl) {
  STRUCTURE(PROPERTIES_V7, ncclNetProperties_v7_t, nccl::v7::NetProperties);
  TABLE(TABLE_V7, ncclNet_v7_t, nccl::v7::Net);
}

TEST(NcclHeaders, V8_MatchesNccl) {
  STRUCTURE(PROPERTIES_V8, ncclNetProperties_v8_t, nccl::v8::NetProperties);
  TABLE(TABLE_V7, ncclNet_v8_t, nccl::v8::Net);
}

TEST(NcclHeaders, V9_MatchesNccl) {
  STRUCTURE(VDEVICE, ncclNetVDeviceProps_v9_t, nccl::v9::NetVDeviceProps);
  STRUCTURE(PROPERTIES_V9, ncclNetProperties_v9_t, nccl::v9::NetProperties);
  TABLE(TABLE_V9, ncclNet_v9_t, nccl::v9::Net);
}

TEST(NcclHeaders, V10_MatchesNccl) {
  STRUCTURE(VDEVICE, ncclNetVDeviceProps_v10_t, nccl::v10::NetVDeviceProps);
  STRUCTURE(CONFIG, ncclNetCommConfig_v10_t, nccl::v10::NetCommConfig);
  STRUCTURE(PROPERTIES_V9, ncclNetProperties_v10_t, nccl::v10::NetProperties);
  TABLE(TABLE_V9, ncclNet_v10_t, nccl::v10::Net);
}

TEST(NcclHeaders, V11_MatchesNccl) {
  STRUCTURE(VDEVICE, ncclNetVDeviceProps_v11_t, nccl::v11::NetVDeviceProps);
  STRUCTURE(CONFIG, ncclNetCommConfig_v11_t, nccl::v11::NetCommConfig);
  STRUCTURE(COMM_ATTR, ncclNetCommAttr_v11_t, nccl::v11::NetCommAttr);
  STRUCTURE(ATTR, ncclNetAttr_v11_t, nccl::v11::NetAttr);
  STRUCTURE(PROPERTIES_V11, ncclNetProperties_v11_t, nccl::v11::NetProperties);
  TABLE(TABLE_V11, ncclNet_v11_t, nccl::v11::Net);
}

TEST(NcclHeaders, V12_MatchesNccl) {
  STRUCTURE(VDEVICE, ncclNetVDeviceProps_v12_t, nccl::v12::NetVDeviceProps);
  STRUCTURE(CONFIG, ncclNetCommConfig_v12_t, nccl::v12::NetCommConfig);
  STRUCTURE(COMM_ATTR, ncclNetCommAttr_v12_t, nccl::v12::NetCommAttr);
  STRUCTURE(ATTR, ncclNetAttr_v12_t, nccl::v12::NetAttr);
  STRUCTURE(PROPERTIES_V12, ncclNetProperties_v12_t, nccl::v12::NetProperties);
  TABLE(TABLE_V11, ncclNet_v12_t, nccl::v12::Net);
}

#ifdef HAS_NCCL_RMA_HEADERS
TEST(NcclHeaders, RmaV13_MatchesNccl) {
  STRUCTURE(RMA_CONFIG_V13, ncclGinConfig_v13_t, nccl::rma_v13::RmaConfig);
  TABLE(RMA_TABLE_V13, ncclRma_v13_t, nccl::rma_v13::Rma);
  EXPECT_TRUE((std::is_same_v<ncclRma_v13_t, ncclGin_v13_t>));  // ncclGinPlugin_v13 has the same type
}

TEST(NcclHeaders, RmaV14_MatchesNccl) {
  STRUCTURE(RMA_CONFIG_V14, ncclRmaConfig_v14_t, nccl::rma_v14::RmaConfig);
  TABLE(RMA_TABLE_V14, ncclRma_v14_t, nccl::rma_v14::Rma);
}

TEST(NcclHeaders, RmaConstants_MatchNccl) {
  EXPECT_EQ(NCCL_GIN_SIGNAL_OP_INC, static_cast<int>(nccl::kSignalIncrement));
  EXPECT_EQ(NCCL_GIN_SIGNAL_OP_ADD, static_cast<int>(nccl::kSignalAdd));
}
#endif

}  // namespace
