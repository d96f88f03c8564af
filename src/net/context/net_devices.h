// The network devices of a process, as NCCL numbers them: first the ports of the inventory, then the virtual devices
// that makeVDevice has made of several ports. A connection of a virtual device has QPs on all of its ports. Owned by
// the state of the process; any thread.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "verbs/port.h"

namespace verbatim {

class NetDevices {
 public:
  // `ports` must outlive this object.
  explicit NetDevices(std::span<const Port> ports) : physical_(ports) {}

  std::size_t count() const VERBATIM_EXCLUDES(mutex_);

  // The ports of a device. kArgument: there is no such device.
  Result<std::vector<const Port*>> ports(std::size_t device) const VERBATIM_EXCLUDES(mutex_);

  // The port of a physical device, and behind it those of the first virtual device that it is a member of. It exists.
  std::vector<const Port*> merged_with(std::size_t device) const VERBATIM_EXCLUDES(mutex_);

  // The indices of its ports: for a physical device its own index. It exists.
  std::vector<int> members(std::size_t device) const VERBATIM_EXCLUDES(mutex_);

  // The device of these physical devices, 1 or more: a physical device for one member, the virtual device with these
  // members in any order if there is one, else a new one. An error has been logged.
  Result<std::size_t> merge(std::span<const int> members) VERBATIM_EXCLUDES(mutex_);

  // What NCCL's indices mean, so that the virtual devices can be made again when the devices are opened again.
  struct Table {
    std::vector<std::string> ports;  // by Port::nccl_name
    std::vector<std::vector<int>> virtual_devices;
  };
  Table table() const VERBATIM_EXCLUDES(mutex_);
  // Makes them again if the ports are the same. Otherwise every index may belong to another device; this is logged.
  void restore(const Table& table) VERBATIM_EXCLUDES(mutex_);
  // Removes the restored virtual devices if no device was used since. Returns whether there were any.
  bool remove_unused() VERBATIM_EXCLUDES(mutex_);

 private:
  Status check(std::span<const int> members) const VERBATIM_REQUIRES(mutex_);
  std::vector<std::string> port_names() const;

  const std::span<const Port> physical_;
  mutable Mutex mutex_;
  std::vector<std::vector<int>> virtual_ VERBATIM_GUARDED_BY(mutex_);
  mutable bool is_used_ VERBATIM_GUARDED_BY(mutex_) = true;  // false: since restore() no device was used
};

// Unique among the devices of this host if the names of the ports are; at most kMaxDeviceName bytes. `device`: the
// device's index.
std::string virtual_device_name(std::span<const Port* const> ports, std::size_t device);
// NCCL compares names with those in its topology, where they are cut after 255 bytes.
inline constexpr std::size_t kMaxDeviceName = 255;

}  // namespace verbatim
