// The RDMA devices of this process and their ports, as the plugin shows them to NCCL.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/result.h"
#include "verbs/gid.h"
#include "verbs/handles.h"
#include "verbs/mlx5.h"
#include "verbs/mr_cache.h"
#include "verbs/port_history.h"
#include "verbs/verbs.h"

namespace verbatim {

// An open device: one context, protection domain and MR cache, shared by every communicator of the process. Owned by
// the DeviceInventory. Everything but the MR cache, the history and what it counts is immutable; any
// thread may use it.
class Device {
 public:
  // `mlx5` may be nullptr. Fails without logging: the inventory counts the device as skipped.
  static Result<std::unique_ptr<Device>> open(const Verbs& verbs, const Mlx5* mlx5, ibv_device* device,
                                              bool relaxed_ordering);

  const Verbs& verbs() const { return verbs_; }
  const std::string& name() const { return name_; }  // libibverbs' name, "mlx5_0"
  const std::string& sysfs_path() const {
    return sysfs_path_;
  }  // ".../infiniband/mlx5_0"; may name nothing that exists
  ibv_context* context() const { return context_.get(); }
  ibv_pd* pd() const { return pd_.get(); }
  const ibv_device_attr& attributes() const { return attributes_; }
  bool is_mlx5() const { return is_mlx5_; }
  const Mlx5Capabilities& mlx5_capabilities() const { return mlx5_capabilities_; }
  // Why it takes no dma-bufs; 0: it does.
  int dmabuf_errno() const { return dmabuf_errno_; }
  // True once: that peer memory stands in for dma-bufs is worth a line, but not one each time.
  bool is_first_fallback() const { return !fallback_reported_.exchange(true); }
  bool relaxed_ordering() const { return relaxed_ordering_; }
  // Queue pairs of this process, of all its connections.
  std::atomic<std::size_t>& live_qps() const { return live_qps_; }
  MrCache& mr_cache() const { return *mr_cache_; }
  PortHistory& history() const { return *history_; }

 private:
  // Takes `context` and `pd` over only when nothing can fail before their members stand.
  Device(const Verbs& verbs, std::string name, std::string sysfs_path, UniqueContext&& context, UniquePd&& pd,
         bool relaxed_ordering);

  const Verbs& verbs_;
  const std::string name_;
  const std::string sysfs_path_;
  const UniqueContext context_;
  const UniquePd pd_;
  ibv_device_attr attributes_ = {};
  bool is_mlx5_ = false;
  Mlx5Capabilities mlx5_capabilities_;
  int dmabuf_errno_ = 0;
  mutable std::atomic<bool> fallback_reported_{false};
  mutable std::atomic<std::size_t> live_qps_{0};
  const bool relaxed_ordering_;
  const std::unique_ptr<MrCache> mr_cache_;
  const std::unique_ptr<PortHistory> history_;
};

// What memory a port's device reads and writes; the values are NCCL's NCCL_PTR_*.
enum PtrSupport : unsigned { kPtrHost = 0x1, kPtrCuda = 0x2, kPtrDmaBuf = 0x4 };

// One active port of one device: what NCCL calls a network device.
struct Port {
  Device* device = nullptr;
  std::uint8_t port_num = 1;

  // "verbatim_mlx5_0"; with a suffix for every port but the first, "verbatim_mlx5_0_p2", because NCCL keys its topology
  // by this name. The suffix depends on the port number alone, so that a port that is down renames no other.
  std::string name;
  std::uint32_t speed_mbps = 0;
  std::optional<std::string> pci_path;  // function and device digits zeroed, as NCCL does; nullopt: not a PCI device
  std::uint64_t guid = 0;               // of the NIC (system image), host order
  std::uint32_t topology_port = 1;      // unique among the ports of one NIC: NCCL shares bandwidth by (guid, port)
  std::uint8_t link_layer = IBV_LINK_LAYER_UNSPECIFIED;
  std::uint16_t lid = 0;
  ibv_mtu active_mtu = IBV_MTU_256;
  std::uint64_t max_msg_bytes = 0;
  unsigned ptr_support = kPtrHost;
  int rail_id = -1;  // -1: unset
  int plane_id = -1;
  GidEntry gid;
  bool adaptive_routing = false;  // config's switch, resolved by link layer

  bool is_roce() const { return link_layer == IBV_LINK_LAYER_ETHERNET; }
};

// Why a device or port is not used.
struct SkippedPort {
  std::string device;
  unsigned port_num = 0;  // 0: the whole device
  std::string reason;
};

// Everything usable on this host under one Config. Immutable once open. Devices close when the last owner goes.
class DeviceInventory {
 public:
  // Loads libmlx5 if it can, makes verbs fork-safe, opens the devices and keeps their active ports, in order of PCI
  // path, name and port. Fails with one warning that gives the reason for every device that was skipped.
  static Result<std::shared_ptr<DeviceInventory>> open(const Verbs& verbs, const Config& config);

  // The same with libmlx5 given (or nullptr) and `root` put in front of /sys/module, /sys/kernel and /proc.
  static Result<std::shared_ptr<DeviceInventory>> open(const Verbs& verbs, const Mlx5* mlx5, const Config& config,
                                                       const std::string& root);

  std::span<const Port> ports() const { return ports_; }
  std::span<const std::unique_ptr<Device>> devices() const { return devices_; }
  std::span<const SkippedPort> skipped() const { return skipped_; }

 private:
  DeviceInventory() = default;

  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<Port> ports_;
  std::vector<SkippedPort> skipped_;
};

// Lane rate times width of an ibv_port_attr, 0 when either code is unknown.
std::uint32_t port_speed_mbps(std::uint8_t active_speed, std::uint8_t active_width);

}  // namespace verbatim
