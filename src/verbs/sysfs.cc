#include "verbs/sysfs.h"

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string_view>

namespace verbatim {
namespace {

// "0000:0c:00.1". The domain of a VMD controller can have five digits.
bool is_pci_address(std::string_view name) {
  constexpr std::string_view kShape = "0000:00:00.0";
  if (name.size() > kShape.size()) name.remove_prefix(name.size() - kShape.size());
  if (name.size() != kShape.size()) return false;
  return std::equal(name.begin(), name.end(), kShape.begin(), [](char given, char shape) {
    return shape == '0' ? std::isxdigit(static_cast<unsigned char>(given)) != 0 : given == shape;
  });
}

}  // namespace

bool sysfs_exists(const std::string& sysfs_path) {
  return !sysfs_path.empty() && access(sysfs_path.c_str(), F_OK) == 0;
}

bool has_kernel_driver(const std::string& sysfs_path) {
  return sysfs_exists(sysfs_path) &&
         (!sysfs_exists(sysfs_path + "/device") || sysfs_exists(sysfs_path + "/device/driver"));
}

std::optional<std::string> sysfs_pci_path(const std::string& sysfs_path) {
  if (sysfs_path.empty()) return std::nullopt;
  const std::unique_ptr<char, void (*)(void*)> real(realpath((sysfs_path + "/device").c_str(), nullptr), std::free);
  if (real == nullptr) return std::nullopt;
  std::string path = real.get();
  if (!is_pci_address(std::string_view(path).substr(path.rfind('/') + 1))) return std::nullopt;
  path[path.size() - 1] = '0';
  path[path.size() - 3] = '0';
  path[path.size() - 4] = '0';
  return path;
}

std::optional<std::uint32_t> sysfs_port_speed_mbps(const std::string& sysfs_path, std::uint8_t port_num) {
  std::ifstream file(sysfs_path + "/ports/" + std::to_string(port_num) + "/rate");  // "400 Gb/sec (4X NDR)"
  double gigabits = 0;
  if (!(file >> gigabits) || gigabits <= 0 || gigabits > 1e6) return std::nullopt;
  return static_cast<std::uint32_t>(gigabits * 1000);
}

std::optional<int> sysfs_numa_node(const std::string& sysfs_path) {
  std::ifstream file(sysfs_path + "/device/numa_node");  // -1: the platform has no nodes
  int node = -1;
  if (!(file >> node) || node < 0) return std::nullopt;
  return node;
}

bool peer_memory_loaded(const std::string& root) {
  for (const char* sign :
       {"/sys/kernel/mm/memory_peers/nv_mem/version", "/sys/kernel/mm/memory_peers/nv_mem_nc/version",
        "/sys/module/nvidia_peermem", "/sys/module/nv_peer_mem"}) {
    if (access((root + sign).c_str(), F_OK) == 0) return true;
  }
  std::ifstream modules(root + "/proc/modules");
  for (std::string line; std::getline(modules, line);) {
    if (line.starts_with("nvidia_peermem ") || line.starts_with("nv_peer_mem ")) return true;
  }
  return false;
}

std::optional<std::uint64_t> smallest_gpu_bar1(const std::string& root) {
  const std::string driver = root + "/sys/bus/pci/drivers/nvidia";
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(driver.c_str()), ::closedir);
  std::optional<std::uint64_t> smallest;
  if (directory == nullptr) return smallest;
  while (const dirent* entry = ::readdir(directory.get())) {
    if (!is_pci_address(entry->d_name)) continue;
    // A line for each region: begin, end, flags. The first six are the device's own. BAR1 is the largest; it is the
    // second or, behind a BAR0 of 64 bits, the third.
    constexpr int kOwnRegions = 6;
    std::ifstream regions(std::string(driver).append("/").append(entry->d_name).append("/resource"));
    std::uint64_t largest = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::uint64_t flags = 0;
    for (int i = 0; i < kOwnRegions && regions >> std::hex >> begin >> end >> flags; ++i) {
      if (end > begin) largest = std::max(largest, end - begin + 1);
    }
    if (largest != 0) smallest = std::min(smallest.value_or(UINT64_MAX), largest);
  }
  return smallest;
}

std::string rdma_control_group_limit(const std::string& root, const std::string& device) {
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string path;
  for (std::string line; std::getline(groups, line);) {
    if (line.starts_with("0::/")) path = line.substr(3);  // version 2; version 1 has a hierarchy for each controller
  }
  while (true) {
    std::ifstream limits(std::string(root).append("/sys/fs/cgroup").append(path).append("/rdma.max"));
    for (std::string line; std::getline(limits, line);) {
      if (!line.starts_with(device + " ")) continue;
      std::string limit = line.substr(device.size() + 1);
      if (limit.find_first_of("0123456789") != std::string::npos) return limit;
    }
    if (path.empty()) return {};
    path.erase(path.rfind('/'));
  }
}

}  // namespace verbatim
