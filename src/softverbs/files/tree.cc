#include "softverbs/files/tree.h"

#include <dirent.h>
#include <endian.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>

#include "softverbs/host/device_attributes.h"

namespace verbatim::softverbs {
namespace {

constexpr std::uint32_t kPacketBytes = 4096;
constexpr std::uint32_t kWordBytes = 4;  // the unit of port_xmit_data and port_rcv_data

__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...) {
  char buffer[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

std::string guid_text(__be64 guid) {
  const std::uint64_t value = be64toh(guid);
  return text("%04x:%04x:%04x:%04x\n", static_cast<unsigned>(value >> 48), static_cast<unsigned>(value >> 32 & 0xffff),
              static_cast<unsigned>(value >> 16 & 0xffff), static_cast<unsigned>(value & 0xffff));
}

std::string gid_text(const ibv_gid& gid) {
  std::string result;
  for (std::size_t i = 0; i < sizeof gid.raw; i += 2) {
    result += text("%s%02x%02x", i == 0 ? "" : ":", gid.raw[i], gid.raw[i + 1]);
  }
  return result + "\n";
}

const char* state_text(ibv_port_state state) {
  return state == IBV_PORT_ACTIVE ? "4: ACTIVE\n" : "1: DOWN\n";
}

std::string rate_text(const ibv_port_attr& port, std::uint32_t gbps) {
  struct Name {
    std::uint8_t code;
    const char* name;
  };
  constexpr std::array kSpeeds{Name{4, "QDR"}, Name{32, "EDR"}, Name{64, "HDR"}, Name{128, "NDR"}};
  constexpr std::array kWidths{Name{1, "1X"}, Name{2, "4X"}, Name{4, "8X"}, Name{16, "2X"}};
  const auto name_of = [](const auto& names, std::uint8_t code) {
    const auto found = std::find_if(names.begin(), names.end(), [&](const Name& entry) { return entry.code == code; });
    return found != names.end() ? found->name : "?";
  };
  return text("%u Gb/sec (%s %s)\n", gbps, name_of(kWidths, port.active_width), name_of(kSpeeds, port.active_speed));
}

std::string below(std::string directory, std::string_view name) {
  return directory.append("/").append(name);
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string real_path(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> resolved(::realpath(path.c_str(), nullptr), std::free);
  return resolved ? resolved.get() : "";
}

std::vector<std::string> entries_of(const std::string& path) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(path.c_str()), ::closedir);
  if (!directory) return names;
  while (const dirent* const entry = ::readdir(directory.get())) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

constexpr const char* kPciDevices = "/sys/bus/pci/devices/";
constexpr const char* kDriver = "/sys/bus/pci/drivers/softverbs";
constexpr const char* kPeerMemoryModule = "/sys/module/nvidia_peermem";

// NUMA node and processors of an invented device: those of the machine's first GPU, or of its first PCI device.
struct Locality {
  std::string numa_node = "-1";
  std::string cpus;
  std::string cpu_list;
};

Locality locality() {
  Locality result;
  std::string model;
  for (const std::string& address : entries_of(kPciDevices)) {
    const bool is_gpu = first_line(kPciDevices + address + "/class").starts_with("0x03") &&
                        first_line(kPciDevices + address + "/vendor") == "0x10de";
    if (model.empty() || is_gpu) model = kPciDevices + address;
    if (is_gpu) break;
  }
  if (!model.empty()) {
    result = {first_line(model + "/numa_node"), first_line(model + "/local_cpus"),
              first_line(model + "/local_cpulist")};
  }
  if (!result.cpus.empty()) return result;
  const long count = std::max(1L, ::sysconf(_SC_NPROCESSORS_CONF));
  for (long first = 0; first < count; first += 32) {
    const long bits = std::min(32L, count - first);
    const std::string word = text(bits == 32 ? "%08lx" : "%lx", (1UL << bits) - 1);
    result.cpus = result.cpus.empty() ? word : word + "," + result.cpus;
  }
  result.cpu_list = text("0-%ld", count - 1);
  return result;
}

class TreeMaker {
 public:
  explicit TreeMaker(const Settings& settings) : settings_(settings) {
    tree_.served = {"/dev/infiniband", "/sys/class/infiniband", "/sys/class/infiniband_verbs"};
    directory("/dev/infiniband");
    directory("/sys/class/infiniband");
    file("/sys/class/infiniband_verbs/abi_version", "6\n");
    // The modules that let NICs access GPU memory do not know these devices. With SOFTVERBS_GPU_MEMORY=peer-memory
    // there is one that does.
    for (const char* module : {kPeerMemoryModule, "/sys/module/nv_peer_mem", "/sys/kernel/mm/memory_peers"}) {
      tree_.served.emplace_back(module);
    }
    if (!settings_.takes(GpuMemory::kPeerMemory)) return;
    file(std::string(kPeerMemoryModule) + "/initstate", "live\n");
    file(std::string(kDriver) + "/uevent", "");
    serve(kDriver);
  }

  Tree make() {
    for (std::uint32_t device = 0; device < settings_.devices; ++device) add_device(device);
    for (const std::string& address : settings_.data_direct) pci_device(address);
    // The directory lists the devices of the machine and ours.
    std::string all = kPciDevices;
    all.pop_back();
    directory(all);
    for (const std::string& address : entries_of(all)) link(below(all, address), real_path(kPciDevices + address));
    tree_.listed.push_back(std::move(all));
    return std::move(tree_);
  }

 private:
  void directory(std::string path) { tree_.nodes.push_back({std::move(path), NodeKind::kDirectory, ""}); }
  void file(std::string path, std::string content) {
    tree_.nodes.push_back({std::move(path), NodeKind::kFile, std::move(content)});
  }
  void link(std::string path, std::string target) {
    const auto same = [&](const Node& node) { return node.path == path; };
    if (std::any_of(tree_.nodes.begin(), tree_.nodes.end(), same)) return;
    tree_.nodes.push_back({std::move(path), NodeKind::kLink, std::move(target)});
  }
  void serve(std::string path) {
    if (std::find(tree_.served.begin(), tree_.served.end(), path) == tree_.served.end()) {
      tree_.served.push_back(std::move(path));
    }
  }

  // Its path in /sys/devices.
  std::string pci_device(std::uint32_t device) {
    const bool chosen = device < settings_.pci.size();
    return pci_device(chosen ? settings_.pci[device] : text("5356:%02x:00.0", device + 1));
  }

  std::string pci_device(const std::string& address) {
    const std::string real = real_path(kPciDevices + address);
    if (!real.empty()) return add_real_device(real, address);
    return add_invented_device(address);
  }

  // A directory that leads to the files of the real device and has those of our device too. Without its `driver`,
  // which does not drive ours.
  std::string add_real_device(const std::string& path, const std::string& address) {
    for (const std::string& name : entries_of(path)) {
      if (name == "driver" || name.starts_with("infiniband")) continue;
      const std::string entry = below(path, name);
      link(entry, entry);
    }
    for (const char* name : {"/infiniband", "/infiniband_verbs", "/driver"}) {
      serve(path + name);
      serve(kPciDevices + address + name);
    }
    link(kPciDevices + address, "../../.." + path.substr(std::string_view("/sys").size()));
    add_driver(path);
    return path;
  }

  std::string add_invented_device(const std::string& address) {
    const std::string bus = address.substr(0, std::string_view("0000:00").size());
    const std::string root = "/sys/devices/pci" + bus;
    // Programs that treat the functions of a card as one device (NCCL) look for the first function.
    for (const std::string& function : {bus + ":00.0", address}) {
      const std::string path = below(root, function);
      if (!real_path(path).empty() || is_known(path + "/class")) continue;
      add_pci_files(path, function);
      serve(path);
      serve(kPciDevices + function);
      link(kPciDevices + function, below("../../../devices/pci" + bus, function));
    }
    const std::string pci_bus = root + "/pci_bus/" + bus;
    if (real_path("/sys/class/pci_bus/" + bus).empty() && !is_known(pci_bus + "/cpuaffinity")) {
      file(pci_bus + "/cpuaffinity", locality_.cpus + "\n");
      file(pci_bus + "/cpulistaffinity", locality_.cpu_list + "\n");
      link("/sys/class/pci_bus/" + bus, "../../devices/pci" + bus + "/pci_bus/" + bus);
      serve("/sys/class/pci_bus/" + bus);
      if (real_path(root).empty()) serve(root);
    }
    return invented_pci_path(address);
  }

  // A driver for peer memory needs a driver of the device.
  void add_driver(const std::string& path) {
    if (!settings_.takes(GpuMemory::kPeerMemory)) return;
    std::string target;
    for (auto up = std::count(path.begin(), path.end(), '/') - 1; up > 0; --up) target += "../";
    link(path + "/driver", target + std::string(kDriver).substr(std::string_view("/sys/").size()));
  }

  bool is_known(const std::string& path) const {
    return std::any_of(tree_.nodes.begin(), tree_.nodes.end(), [&](const Node& node) { return node.path == path; });
  }

  // The header that lspci reads.
  std::string config_space() const {
    std::string bytes(64, '\0');
    const auto put = [&](std::size_t at, std::uint32_t value) {
      bytes[at] = static_cast<char>(value & 0xff);
      bytes[at + 1] = static_cast<char>(value >> 8 & 0xff);
    };
    put(0x00, settings_.vendor_id);
    put(0x02, settings_.vendor_part_id);
    put(0x0a, settings_.ethernet ? 0x0200 : 0x0207);
    put(0x2c, settings_.vendor_id);
    put(0x2e, settings_.vendor_part_id);
    return bytes;
  }

  void add_pci_files(const std::string& path, const std::string& address) {
    const std::string vendor = text("0x%04x\n", settings_.vendor_id & 0xffff);
    const std::string part = text("0x%04x\n", settings_.vendor_part_id & 0xffff);
    file(path + "/class", settings_.ethernet ? "0x020000\n" : "0x020700\n");
    file(path + "/config", config_space());
    file(path + "/vendor", vendor);
    file(path + "/device", part);
    file(path + "/subsystem_vendor", vendor);
    file(path + "/subsystem_device", part);
    file(path + "/revision", "0x00\n");
    file(path + "/irq", "0\n");
    file(path + "/resource", "");
    file(path + "/enable", "1\n");
    file(path + "/numa_node", locality_.numa_node + "\n");
    file(path + "/local_cpus", locality_.cpus + "\n");
    file(path + "/local_cpulist", locality_.cpu_list + "\n");
    for (const char* which : {"max", "current"}) {
      file(path + "/" + which + "_link_speed", "32.0 GT/s PCIe\n");
      file(path + "/" + which + "_link_width", "16\n");
    }
    file(path + "/uevent", "PCI_SLOT_NAME=" + address + "\n");
    link(path + "/subsystem", "../../../bus/pci");
    add_driver(path);
  }

  void add_device(std::uint32_t device) {
    const std::string name = text("softverbs%u", device);
    const std::string uverbs = text("uverbs%u", device);
    const std::string pci = pci_device(device);
    const std::string pci_name = pci.substr(pci.rfind('/') + 1);
    const std::string below_sys = pci.substr(std::string_view("/sys/").size());
    const auto up = [](const std::string& path, std::size_t skipped) {
      std::string result;
      for (auto slashes = static_cast<std::size_t>(std::count(path.begin(), path.end(), '/')); slashes > skipped;
           --slashes) {
        result += "../";
      }
      return result;
    };

    const std::string ib = pci + "/infiniband/" + name;
    const ibv_device_attr attributes = device_attributes(device, settings_);
    file(ib + "/board_id", "SOFTVERBS\n");
    file(ib + "/fw_ver", text("%s\n", attributes.fw_ver));
    file(ib + "/hca_type", "softverbs\n");
    file(ib + "/hw_rev", "0\n");
    file(ib + "/node_desc", name + "\n");
    file(ib + "/node_guid", guid_text(attributes.node_guid));
    file(ib + "/node_type", "1: CA\n");
    file(ib + "/sys_image_guid", guid_text(attributes.sys_image_guid));
    file(ib + "/uevent", "NAME=" + name + "\n");
    link(ib + "/device", "../../../" + pci_name);
    link(ib + "/subsystem", up(ib, 2) + "class/infiniband");
    auto port = std::make_unique<SharedPort>();
    fill_port(*port, device, settings_);
    for (PortFile& entry : port_files(*port, device, TrafficCounters{}, settings_)) {
      file(ib + "/ports/1/" + entry.name, std::move(entry.content));
    }
    link("/sys/class/infiniband/" + name, "../../" + below_sys + "/infiniband/" + name);

    const std::string verbs = pci + "/infiniband_verbs/" + uverbs;
    const unsigned minor = kUverbsFirstMinor + device;
    file(verbs + "/abi_version", "1\n");
    file(verbs + "/dev", text("%u:%u\n", kUverbsMajor, minor));
    file(verbs + "/ibdev", name + "\n");
    file(verbs + "/uevent", text("MAJOR=%u\nMINOR=%u\nDEVNAME=infiniband/%s\n", kUverbsMajor, minor, uverbs.c_str()));
    link(verbs + "/device", "../../../" + pci_name);
    link(verbs + "/subsystem", up(verbs, 2) + "class/infiniband_verbs");
    link("/sys/class/infiniband_verbs/" + uverbs, "../../" + below_sys + "/infiniband_verbs/" + uverbs);
    link("/dev/infiniband/" + uverbs, "/dev/null");
  }

  const Settings& settings_;
  const Locality locality_ = locality();
  Tree tree_;
};

bool parse_number(std::string_view digits, std::uint32_t& value) {
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  return error == std::errc{} && end == digits.data() + digits.size();
}

}  // namespace

Tree make_tree(const Settings& settings) {
  return TreeMaker(settings).make();
}

std::vector<PortFile> port_files(const SharedPort& port, std::uint32_t device, const TrafficCounters& traffic,
                                 const Settings& settings) {
  const ibv_port_attr attributes = port_attributes(port, device, settings);
  std::vector<PortFile> files;
  const auto add = [&](std::string name, std::string content) {
    files.push_back({std::move(name), std::move(content)});
  };
  const auto add_number = [&](std::string name, std::uint64_t value) {
    add(std::move(name), std::to_string(value) + "\n");
  };
  const bool is_down = attributes.state != IBV_PORT_ACTIVE;
  add("cap_mask", text("0x%08x\n", attributes.port_cap_flags));
  add("lid", text("0x%x\n", attributes.lid));
  add("lid_mask_count", "0\n");
  add("link_layer", port.ethernet != 0 ? "Ethernet\n" : "InfiniBand\n");
  add("phys_state", is_down ? "3: Disabled\n" : "5: LinkUp\n");
  add("pkeys/0", text("0x%04x\n", kDefaultPkey));
  add("rate", rate_text(attributes, settings.speed_gbps[device]));
  add("sm_lid", text("0x%x\n", attributes.sm_lid));
  add("sm_sl", "0\n");
  add("state", state_text(attributes.state));
  for (std::uint32_t index = 0; index < kGidTableLength; ++index) {
    const SharedGid& gid = port.gids()[index];
    const std::string number = std::to_string(index);
    add("gids/" + number, gid_text(gid.gid));
    add("gid_attrs/types/" + number, gid.type == IBV_GID_TYPE_ROCE_V2 ? "RoCE v2\n" : "IB/RoCE v1\n");
    files.back().readable = gid.valid != 0;
    // The network interface that every machine has.
    add("gid_attrs/ndevs/" + number, "lo\n");
    files.back().readable = gid.valid != 0 && port.ethernet != 0;
  }
  const auto packets = [](const Counter& messages, const Counter& bytes) {
    return std::max(messages.get(), (bytes.get() + kPacketBytes - 1) / kPacketBytes);
  };
  const std::uint64_t sent = packets(traffic.xmit_messages, traffic.xmit_bytes);
  const std::uint64_t received = packets(traffic.rcv_messages, traffic.rcv_bytes);
  add_number("counters/port_xmit_data", traffic.xmit_bytes.get() / kWordBytes);
  add_number("counters/port_rcv_data", traffic.rcv_bytes.get() / kWordBytes);
  for (const char* name : {"counters/port_xmit_packets", "counters/unicast_xmit_packets"}) add_number(name, sent);
  for (const char* name : {"counters/port_rcv_packets", "counters/unicast_rcv_packets"}) add_number(name, received);
  for (const char* name :
       {"VL15_dropped", "excessive_buffer_overrun_errors", "link_downed", "link_error_recovery",
        "local_link_integrity_errors", "multicast_rcv_packets", "multicast_xmit_packets", "port_rcv_constraint_errors",
        "port_rcv_errors", "port_rcv_remote_physical_errors", "port_rcv_switch_relay_errors",
        "port_xmit_constraint_errors", "port_xmit_discards", "port_xmit_wait", "symbol_error"}) {
    add_number(std::string("counters/") + name, 0);
  }
  add_number("hw_counters/lifespan", 10);
  add_number("hw_counters/rx_atomic_requests", traffic.rcv_atomics.get());
  add_number("hw_counters/rx_read_requests", traffic.rcv_reads.get());
  add_number("hw_counters/rx_send_requests", traffic.rcv_sends.get());
  add_number("hw_counters/rx_write_requests", traffic.rcv_writes.get());
  return files;
}

std::optional<PortFileName> parse_port_file(std::string_view path) {
  constexpr std::string_view kDevice = "/infiniband/softverbs";
  constexpr std::string_view kPort = "/ports/1/";
  const std::size_t found = path.rfind(kDevice);
  if (found == std::string_view::npos) return std::nullopt;
  path.remove_prefix(found + kDevice.size());
  const std::size_t digits = std::min(path.find('/'), path.size());
  PortFileName result{};
  if (!parse_number(path.substr(0, digits), result.device) || result.device >= kMaxDevices) return std::nullopt;
  path.remove_prefix(digits);
  if (!path.starts_with(kPort)) return std::nullopt;
  result.name = path.substr(kPort.size());
  return result;
}

std::optional<std::uint32_t> parse_device_node(std::string_view path) {
  constexpr std::string_view kNode = "/dev/infiniband/uverbs";
  std::uint32_t device = 0;
  if (!path.starts_with(kNode) || !parse_number(path.substr(kNode.size()), device)) return std::nullopt;
  return device;
}

}  // namespace verbatim::softverbs
