// The C API: names and conversions, sysfs, and symbols that rdma-core's own programs and drivers need at load time.
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>

#include "base/unique_fd.h"
#include "softverbs/api/exports.h"

namespace {

struct Rate {
  ibv_rate rate;
  int multiple;  // of 2.5 Gb/s
  int mbps;
};

constexpr std::array kRates{
    Rate{IBV_RATE_2_5_GBPS, 1, 2500},     Rate{IBV_RATE_5_GBPS, 2, 5000},       Rate{IBV_RATE_10_GBPS, 4, 10000},
    Rate{IBV_RATE_20_GBPS, 8, 20000},     Rate{IBV_RATE_30_GBPS, 12, 30000},    Rate{IBV_RATE_40_GBPS, 16, 40000},
    Rate{IBV_RATE_60_GBPS, 24, 60000},    Rate{IBV_RATE_80_GBPS, 32, 80000},    Rate{IBV_RATE_120_GBPS, 48, 120000},
    Rate{IBV_RATE_28_GBPS, 11, 28125},    Rate{IBV_RATE_50_GBPS, 20, 53125},    Rate{IBV_RATE_14_GBPS, 6, 14062},
    Rate{IBV_RATE_56_GBPS, 22, 56250},    Rate{IBV_RATE_112_GBPS, 45, 112500},  Rate{IBV_RATE_168_GBPS, 67, 168750},
    Rate{IBV_RATE_25_GBPS, 10, 25781},    Rate{IBV_RATE_100_GBPS, 40, 103125},  Rate{IBV_RATE_200_GBPS, 80, 206250},
    Rate{IBV_RATE_300_GBPS, 120, 309375}, Rate{IBV_RATE_400_GBPS, 160, 425000}, Rate{IBV_RATE_600_GBPS, 240, 637500},
};

}  // namespace

extern "C" {

SOFTVERBS_EXPORT int ibv_rate_to_mult(ibv_rate rate) {
  for (const Rate& known : kRates) {
    if (known.rate == rate) return known.multiple;
  }
  return -1;
}

SOFTVERBS_EXPORT ibv_rate mult_to_ibv_rate(int multiple) {
  for (const Rate& known : kRates) {
    if (known.multiple == multiple) return known.rate;
  }
  return IBV_RATE_MAX;
}

SOFTVERBS_EXPORT int ibv_rate_to_mbps(ibv_rate rate) {
  for (const Rate& known : kRates) {
    if (known.rate == rate) return known.mbps;
  }
  return -1;
}

SOFTVERBS_EXPORT ibv_rate mbps_to_ibv_rate(int mbps) {
  for (const Rate& known : kRates) {
    if (known.mbps == mbps) return known.rate;
  }
  return IBV_RATE_MAX;
}

SOFTVERBS_EXPORT const char* ibv_node_type_str(ibv_node_type type) {
  switch (type) {
    case IBV_NODE_CA:
      return "InfiniBand channel adapter";
    case IBV_NODE_SWITCH:
      return "InfiniBand switch";
    case IBV_NODE_ROUTER:
      return "InfiniBand router";
    case IBV_NODE_RNIC:
      return "iWARP NIC";
    case IBV_NODE_USNIC:
      return "usNIC";
    case IBV_NODE_USNIC_UDP:
      return "usNIC over UDP";
    case IBV_NODE_UNSPECIFIED:
      return "unspecified";
    default:
      return "unknown";
  }
}

SOFTVERBS_EXPORT const char* ibv_port_state_str(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_NOP:
      return "no state change (NOP)";
    case IBV_PORT_DOWN:
      return "down";
    case IBV_PORT_INIT:
      return "init";
    case IBV_PORT_ARMED:
      return "armed";
    case IBV_PORT_ACTIVE:
      return "active";
    case IBV_PORT_ACTIVE_DEFER:
      return "active defer";
  }
  return "invalid state";
}

SOFTVERBS_EXPORT const char* ibv_event_type_str(ibv_event_type event) {
  switch (event) {
    case IBV_EVENT_CQ_ERR:
      return "CQ error";
    case IBV_EVENT_QP_FATAL:
      return "local work queue catastrophic error";
    case IBV_EVENT_QP_REQ_ERR:
      return "invalid request local work queue error";
    case IBV_EVENT_QP_ACCESS_ERR:
      return "local access violation work queue error";
    case IBV_EVENT_COMM_EST:
      return "communication established";
    case IBV_EVENT_SQ_DRAINED:
      return "send queue drained";
    case IBV_EVENT_PATH_MIG:
      return "path migrated";
    case IBV_EVENT_PATH_MIG_ERR:
      return "path migration request error";
    case IBV_EVENT_DEVICE_FATAL:
      return "local catastrophic error";
    case IBV_EVENT_PORT_ACTIVE:
      return "port active";
    case IBV_EVENT_PORT_ERR:
      return "port error";
    case IBV_EVENT_LID_CHANGE:
      return "LID change";
    case IBV_EVENT_PKEY_CHANGE:
      return "P_Key change";
    case IBV_EVENT_SM_CHANGE:
      return "SM change";
    case IBV_EVENT_SRQ_ERR:
      return "SRQ catastrophic error";
    case IBV_EVENT_SRQ_LIMIT_REACHED:
      return "SRQ limit reached";
    case IBV_EVENT_QP_LAST_WQE_REACHED:
      return "last WQE reached";
    case IBV_EVENT_CLIENT_REREGISTER:
      return "client reregistration";
    case IBV_EVENT_GID_CHANGE:
      return "GID table change";
    case IBV_EVENT_WQ_FATAL:
      return "WQ fatal";
  }
  return "unknown";
}

// Private to rdma-core; newer releases export it.
SOFTVERBS_EXPORT const char* ibv_wr_opcode_str(ibv_wr_opcode opcode) {
  switch (opcode) {
    case IBV_WR_RDMA_WRITE:
      return "RDMA_WRITE";
    case IBV_WR_RDMA_WRITE_WITH_IMM:
      return "RDMA_WRITE_WITH_IMM";
    case IBV_WR_SEND:
      return "SEND";
    case IBV_WR_SEND_WITH_IMM:
      return "SEND_WITH_IMM";
    case IBV_WR_RDMA_READ:
      return "RDMA_READ";
    case IBV_WR_ATOMIC_CMP_AND_SWP:
      return "ATOMIC_CMP_AND_SWP";
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
      return "ATOMIC_FETCH_AND_ADD";
    default:
      return "unknown";
  }
}

SOFTVERBS_EXPORT const char* ibv_wc_status_str(ibv_wc_status status) {
  static constexpr std::array kNames{
      "success",
      "local length error",
      "local QP operation error",
      "local EE context operation error",
      "local protection error",
      "Work Request Flushed Error",
      "memory management operation error",
      "bad response error",
      "local access error",
      "remote invalid request error",
      "remote access error",
      "remote operation error",
      "transport retry counter exceeded",
      "RNR retry counter exceeded",
      "local RDD violation error",
      "remote invalid RD request",
      "aborted error",
      "invalid EE context number",
      "invalid EE context state",
      "fatal error",
      "response timeout error",
      "general error",
      "TM error",
      "TM software rendezvous",
  };
  const auto index = static_cast<std::size_t>(status);
  return index < kNames.size() ? kNames[index] : "unknown";
}

SOFTVERBS_EXPORT const char* ibv_get_sysfs_path() {
  return "/sys";
}

// Returns the length without the newline, or -1.
SOFTVERBS_EXPORT int ibv_read_sysfs_file(const char* directory, const char* file, char* buffer, std::size_t bytes) {
  char path[512];
  std::snprintf(path, sizeof path, "%s/%s", directory, file);
  const verbatim::UniqueFd fd(::open(path, O_RDONLY | O_CLOEXEC));
  if (!fd || bytes == 0) return -1;
  ssize_t length = ::read(fd.get(), buffer, bytes - 1);
  if (length < 0) return -1;
  if (length > 0 && buffer[length - 1] == '\n') --length;
  buffer[length] = '\0';
  return static_cast<int>(length);
}

// Drivers of hardware devices call these when a program is linked with them. softverbs has no device for them.
SOFTVERBS_EXPORT void verbs_register_driver_34(const void*) {}
SOFTVERBS_EXPORT void ibv_register_driver(const char*, void*) {}
SOFTVERBS_EXPORT bool verbs_allow_disassociate_destroy = false;

}  // extern "C"
