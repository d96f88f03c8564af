// Every SOFTVERBS_* variable. The process reads them once, at its first ibv_get_device_list. The table in README.md
// lists the same variables.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "softverbs/host/fault_script.h"

namespace verbatim::softverbs {

constexpr std::uint32_t kMaxDevices = 16;
constexpr std::uint32_t kMaxEngines = 64;

// A number for each device.
using PerDevice = std::array<std::uint32_t, kMaxDevices>;
constexpr PerDevice for_all_devices(std::uint32_t number) {
  PerDevice all{};
  all.fill(number);
  return all;
}

// How GPU memory can be registered.
enum class GpuMemory : std::uint8_t {
  kNone = 0,
  kDmabuf = 1,      // by ibv_reg_dmabuf_mr
  kPeerMemory = 2,  // by ibv_reg_mr, as with a driver for peer memory
  kBoth = 3,
};

// What the devices announce, and which RDMA atomics exclude each other.
enum class Atomics : std::uint8_t {
  kHca,     // IBV_ATOMIC_HCA; those of all devices
  kGlob,    // IBV_ATOMIC_GLOB; those of all devices
  kDevice,  // IBV_ATOMIC_HCA; those of one device
};

// What ibv_query_qp returns as rq_psn.
enum class RqPsn : std::uint8_t {
  kExact,     // the PSN that the QP expects next
  kZero,      // in the error state 0
  kCached,    // in the error state what was queried last before it, or set
  kSet,       // in every state what was set
  kAccepted,  // in the error state packets that arrived and were not executed count
};

// The event of a QP whose retries are used up, beside the completion with IBV_WC_RETRY_EXC_ERR.
struct RetryEvent {
  ibv_event_type type;
  bool is_first;  // before the completion
};

struct Settings {
  bool threaded = true;                       // SOFTVERBS_ENGINE=thread|inline
  bool ethernet = true;                       // SOFTVERBS_LINK_LAYER=roce|ib
  bool forbid_cross_memory = false;           // SOFTVERBS_CROSS_MEMORY=forbidden|allowed
  bool by_arrival = false;                    // SOFTVERBS_ARBITRATION=arrival|qpn
  bool adaptive_routing = false;              // SOFTVERBS_ORDERING=adaptive-routing|in-order
  bool dmabuf = false;                        // SOFTVERBS_DMABUF=1|0
  bool grh_required = false;                  // SOFTVERBS_GRH=required|optional
  bool first_sge = false;                     // SOFTVERBS_EMPTY_WRITE=first-sge|empty
  bool reuses_qps = true;                     // SOFTVERBS_QP_REUSE=allowed|refused
  bool flushes_late = false;                  // SOFTVERBS_FLUSH=late|at-once
  bool has_gpu_atomics = true;                // SOFTVERBS_GPU_ATOMICS=allowed|refused
  bool has_lock_limit = true;                 // SOFTVERBS_LOCK_LIMIT=kernel|none
  bool copies_directly = true;                // SOFTVERBS_GPU_COPY=direct|staged
  bool renumbers_gids = false;                // SOFTVERBS_GID_TABLE=renumbered|fixed
  Atomics atomics = Atomics::kHca;            // SOFTVERBS_ATOMICS=hca|glob|device
  RqPsn rq_psn = RqPsn::kExact;               // SOFTVERBS_RQ_PSN=exact|zero|cached|set|accepted
  std::optional<RetryEvent> retry_event;      // SOFTVERBS_RETRY_EVENT=none|fatal-before|fatal-after|...
  GpuMemory gpu_memory = GpuMemory::kDmabuf;  // SOFTVERBS_GPU_MEMORY=dmabuf|peer-memory|both|none
  std::string name_space;
  std::string directory;         // SOFTVERBS_DIRECTORY; empty: /dev/shm, with a registry per user and PID namespace
  std::string trace_file;        // SOFTVERBS_TRACE
  std::string stats_file;        // SOFTVERBS_STATS, %p not yet replaced by the pid
  std::vector<std::string> pci;  // SOFTVERBS_PCI: the PCI addresses of the first devices
  std::vector<std::string> data_direct;  // SOFTVERBS_DATA_DIRECT: those of their Data Direct interfaces
  FaultScript faults;                    // SOFTVERBS_FAULTS, preceded by SOFTVERBS_SEED as a seed clause

  std::uint32_t devices = 1;
  std::uint32_t late_host_ms = 0;  // from a write to host memory until it is visible
  std::uint32_t late_gpu_ms = 0;   // the same for GPU memory
  std::uint32_t subnets = 1;
  std::uint32_t engines = 1;  // threads
  PerDevice link_gbps{};      // all or none are 0: no limit
  std::uint32_t quantum_bytes = 16384;
  std::uint32_t paths = 1;  // of the fabric behind each port
  std::uint32_t seed = 0;
  // A locally administered OUI, that of the devices' GUIDs: it belongs to no vendor, so no program knows its cards.
  std::uint32_t vendor_id = 0x025356;
  std::uint32_t vendor_part_id = 0;
  std::uint32_t mtu_bytes = 4096;
  PerDevice speed_gbps = for_all_devices(100);
  std::uint32_t max_msg_bytes = 1U << 30;
  std::uint32_t max_inline_bytes = 256;
  std::uint32_t max_qp = 8192;
  std::uint32_t max_qp_wr = 16384;
  std::uint32_t max_sge = 16;
  std::uint32_t max_cq = 8192;
  std::uint32_t max_cqe = 1U << 20;
  std::uint32_t max_srq = 2048;
  std::uint32_t max_srq_wr = 16384;
  std::uint32_t max_mr = 1U << 17;
  std::uint32_t max_pd = 16384;

  bool has_rate() const { return link_gbps[0] != 0; }
  bool takes(GpuMemory way) const { return (static_cast<unsigned>(gpu_memory) & static_cast<unsigned>(way)) != 0; }
};

// The settings of this process; nullptr when a variable is malformed. The first call then prints one line on stderr.
const Settings* settings();

// Reads the variables now; nullopt when one is malformed, which is logged.
std::optional<Settings> read_settings();

}  // namespace verbatim::softverbs
