// The RDMA devices of this process and their ports, from which the plugin makes NCCL's network devices.
#pragma once

#include <cstdint>
#include <memory>
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
enum class SkipCause : std::uint8_t {
  kNotSelected,
  kTransport,
  kOpenFailed,
  kOpenLimited,  // by the rdma control group or the device itself
  kQueryFailed,
  kPortDown,
  kNoSubnetManager,
  kNotActive,
  kNoGid,
  kGidSetting,
  kPkeySetting
};

struct SkippedPort {
  std::string device;
  unsigned port_num = 0;  // 0: the whole device
  std::string reason;
  SkipCause cause = SkipCause::kNotActive;
};

// What an operator can do so that the port is used, without "Next:".
std::string next_step(const SkippedPort& skipped, const Config& config);

// What is on this host under one Config. Any thread may read it.
struct DeviceSurvey {
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<Port> ports;  // usable, ordered by PCI path, name and port number
  std::vector<SkippedPort> skipped;
  bool has_failed = false;   // a device or port is skipped because of an error or of a wrong GID or P_Key setting
  bool peer_memory = false;  // a kernel module is loaded that allows NICs to pin GPU memory

  enum class Unused : std::uint8_t { kClose, kKeep };  // devices without a usable port

  // What contexts own together: the devices close when the last one closes. Loads libmlx5 if there is one, and keeps
  // the devices that have usable ports. Without a usable port it fails, with one warning that has the reason for each
  // skipped device.
  static Result<std::shared_ptr<const DeviceSurvey>> open(const Verbs& verbs, const Config& config);
  // For tests: with this libmlx5 (or nullptr), and with `root` before /sys/module, /sys/kernel and /proc.
  static Result<std::shared_ptr<const DeviceSurvey>> open(const Verbs& verbs, const Mlx5* mlx5, const Config& config,
                                                          const std::string& root);

  // Also where nothing is usable. Calls ibv_fork_init and opens the devices. `mlx5` may be nullptr; `root` is put
  // before /sys/module, /sys/kernel and /proc. A setting that is not possible or a host without any device is an error,
  // which has been logged.
  static Result<DeviceSurvey> make(const Verbs& verbs, const Mlx5* mlx5, const Config& config, const std::string& root,
                                   Unused unused);
};

// The types of memory that the ports of `device` can access: PtrSupport.
unsigned ptr_support(const Device& device, bool peer_memory);
// For a device that supports host memory only: why not GPU memory.
std::string why_no_gpu_memory(const Device& device);

// The larger of what `attributes` and sysfs have; 0: unknown.
std::uint32_t port_speed_mbps(const Device& device, std::uint8_t port_num, const ibv_port_attr& attributes);

// Speed of one lane times their number, from the codes in ibv_port_attr. 0 when a code is unknown.
std::uint32_t port_speed_mbps(std::uint8_t active_speed, std::uint8_t active_width);

}  // namespace verbatim
