// What only the kernel's files tell about a device: where it sits, and what loaded modules allow. A device of a library
// that has no kernel driver has none of these files, which is no error.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace verbatim {

// `sysfs_path` is the device's directory, /sys/class/infiniband/mlx5_0.
bool sysfs_exists(const std::string& sysfs_path);

// The real path of the PCI device, "/sys/devices/pci0000:00/0000:00:01.0/0000:0c:00.0". The digits of its function and
// device number are zeroed, as NCCL does it: ports and virtual functions of one card are one NIC to its topology.
// nullopt when there is no such file or the device is not on PCI.
std::optional<std::string> sysfs_pci_path(const std::string& sysfs_path);

// The "rate" file: it knows speeds that ibv_port_attr cannot express.
std::optional<std::uint32_t> sysfs_port_speed_mbps(const std::string& sysfs_path, std::uint8_t port_num);

// Whether a kernel module that lets NICs pin GPU memory is loaded; `root` goes in front of /sys and /proc.
bool peer_memory_loaded(const std::string& root);

}  // namespace verbatim
