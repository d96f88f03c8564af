// Facts about a device from files of the kernel: its PCI path, the speed of its ports, and modules for GPU memory. A
// device without a kernel driver (softverbs) may have no such files, which is no error.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace verbatim {

// `sysfs_path` is the device's directory, /sys/class/infiniband/mlx5_0.
bool sysfs_exists(const std::string& sysfs_path);

// False for a device of softverbs: it has no files, or the files of its launcher, whose PCI device has no driver. A
// device that is no PCI device (soft-RoCE) has files without `device`.
bool has_kernel_driver(const std::string& sysfs_path);

// The real path of the PCI device, "/sys/devices/pci0000:00/0000:00:01.0/0000:0c:00.0". The digits of its device and
// function number are replaced by zeros, as in NCCL, whose topology has one NIC for all ports and virtual functions of
// a card. nullopt when the file does not exist or the device is not a PCI device.
std::optional<std::string> sysfs_pci_path(const std::string& sysfs_path);

// The speed in the file "rate", which can have speeds that ibv_port_attr cannot express (XDR).
std::optional<std::uint32_t> sysfs_port_speed_mbps(const std::string& sysfs_path, std::uint8_t port_num);

// The node of the PCI device. nullopt: none, or not known.
std::optional<int> sysfs_numa_node(const std::string& sysfs_path);

// Whether a kernel module is loaded that allows NICs to pin GPU memory. `root` is put before /sys and /proc.
bool peer_memory_loaded(const std::string& root);
// The smallest BAR1 of the NVIDIA GPUs, in bytes: NICs reach GPU memory only through it. nullopt: there is no GPU.
std::optional<std::uint64_t> smallest_gpu_bar1(const std::string& root);
// "hca_handle=2 hca_object=max": how the rdma control group of this process, or one above it, limits a device. Empty:
// it does not.
std::string rdma_control_group_limit(const std::string& root, const std::string& device);

}  // namespace verbatim
