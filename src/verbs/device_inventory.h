// The RDMA devices of this process and their ports, from which the plugin makes NCCL's network devices.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/result.h"
#include "verbs/device.h"
#include "verbs/mlx5.h"
#include "verbs/port.h"
#include "verbs/verbs.h"

namespace verbatim {

// A device or port that is not used, and why.
struct SkippedPort {
  std::string device;
  unsigned port_num = 0;  // 0: the whole device
  std::string reason;
};

// All usable devices and ports of this host under one Config. Owned by the communicators' contexts together: the
// devices close when the last context closes. Immutable after open; any thread may read it.
class DeviceInventory {
 public:
  // Loads libmlx5 if there is one, calls ibv_fork_init, opens the devices and keeps their active ports, ordered by PCI
  // path, name and port number. Without a usable port it fails, with one warning that has the reason for each skipped
  // device.
  static Result<std::shared_ptr<DeviceInventory>> open(const Verbs& verbs, const Config& config);

  // For tests: with this libmlx5 (or nullptr), and with `root` before /sys/module, /sys/kernel and /proc.
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

// Speed of one lane times their number, from the codes in ibv_port_attr. 0 when a code is unknown.
std::uint32_t port_speed_mbps(std::uint8_t active_speed, std::uint8_t active_width);

}  // namespace verbatim
