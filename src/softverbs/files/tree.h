// The files of the devices that programs look for: /dev/infiniband, /sys/class/infiniband, /sys/class/infiniband_verbs
// and the PCI devices above them. Computed in memory from the settings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "softverbs/host/layout.h"
#include "softverbs/host/settings.h"

namespace verbatim::softverbs {

enum class NodeKind { kDirectory, kFile, kLink };

// Paths are absolute, as programs see them. Parent directories exist without a node.
struct Node {
  std::string path;
  NodeKind kind;
  std::string content;  // of a file; the target of a link
};

struct Tree {
  std::vector<Node> nodes;
  std::vector<std::string> served;  // these paths and everything below come from the tree
  std::vector<std::string> listed;  // these directories come from the tree, and what is not served below does not
};

Tree make_tree(const Settings& settings);

// A file of /sys/class/infiniband/softverbsN/ports/1.
struct PortFile {
  std::string name;  // "counters/port_xmit_data"
  std::string content;
  bool readable = true;  // false: the kernel answers EINVAL, as for the type of an empty GID
};
std::vector<PortFile> port_files(const SharedPort& port, std::uint32_t device, const TrafficCounters& traffic,
                                 const Settings& settings);

// The device and the name of a port's file, from the resolved path ".../infiniband/softverbs0/ports/1/NAME".
struct PortFileName {
  std::uint32_t device;
  std::string_view name;
};
std::optional<PortFileName> parse_port_file(std::string_view path);

// The device number N of "/dev/infiniband/uverbsN".
std::optional<std::uint32_t> parse_device_node(std::string_view path);
constexpr unsigned kUverbsMajor = 231;
constexpr unsigned kUverbsFirstMinor = 192;

}  // namespace verbatim::softverbs
