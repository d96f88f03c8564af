#include "verbs/sysfs.h"

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

}  // namespace verbatim
