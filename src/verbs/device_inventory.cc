#include "verbs/device_inventory.h"

#include <endian.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <iterator>
#include <span>
#include <utility>

#include "base/log.h"
#include "verbs/errors.h"
#include "verbs/hca_filter.h"
#include "verbs/sysfs.h"

namespace verbatim {
namespace {

// NCCL assumes the same speed for a port of unknown speed.
constexpr std::uint32_t kUnknownSpeedMbps = 10'000;

// A GPU with a large BAR1 has all of its memory there; without, 256 MiB is usual.
constexpr std::uint64_t kEnoughBar1Bytes = std::uint64_t{1} << 30;

struct Skip {
  SkipCause cause;
  std::string reason;
};

Skip not_active(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_DOWN:
      return {SkipCause::kPortDown, "port is DOWN"};
    case IBV_PORT_INIT:
      return {SkipCause::kNoSubnetManager, "port is in INIT (no subnet manager has configured it)"};
    case IBV_PORT_ARMED:
      return {SkipCause::kNoSubnetManager, "port is ARMED (no subnet manager has activated it)"};
    default:
      return {SkipCause::kNotActive, "port is not ACTIVE"};
  }
}

// Opens devices and collects their usable ports for DeviceSurvey::make.
struct DeviceEnumerator {
  const Verbs& verbs;
  const Mlx5* mlx5;
  const Config& config;
  const HcaFilter& filter;
  bool relaxed_ordering;
  DeviceSurvey::Unused unused;
  DeviceSurvey& survey;

  void add_device(ibv_device* found) {
    const std::string name = verbs.get_device_name(found);
    if (!filter.may_select(name)) return skip(name, 0, not_selected());
    if (found->transport_type != IBV_TRANSPORT_IB) {
      return skip(name, 0, {SkipCause::kTransport, "device has no InfiniBand or RoCE transport"});
    }
    Result<std::unique_ptr<Device>> device = Device::open(verbs, mlx5, found, relaxed_ordering);
    if (!device) {
      std::string reason = explain_open(*found, device.error());
      // EPERM is no failure: a container can see devices in sysfs that it is not allowed to open.
      survey.has_failed = survey.has_failed || device.error().sys_errno != EPERM;
      const bool limited = device.error().sys_errno == EAGAIN;
      return skip(name, 0, {limited ? SkipCause::kOpenLimited : SkipCause::kOpenFailed, std::move(reason)});
    }
    if (mlx5 != nullptr && config.data_direct != DataDirect::kOff) (*device)->find_data_direct(*mlx5);
    const std::size_t ports_before = survey.ports.size();
    for (unsigned port_num = 1; port_num <= (*device)->attributes().phys_port_cnt; ++port_num) {
      add_port(**device, static_cast<std::uint8_t>(port_num));
    }
    if (survey.ports.size() > ports_before || unused == DeviceSurvey::Unused::kKeep) {
      survey.devices.push_back(*std::move(device));
    }
  }

  // Only the first failure names the device node, so that all later ones have the same reason and share one entry of
  // the log line.
  std::string explain_open(const ibv_device& device, const Error& error) const {
    std::string text = std::string(error.operation) + " failed: " + std::strerror(error.sys_errno);
    if (!survey.has_failed && error.operation == std::string_view("ibv_open_device") && device.dev_name[0] != '\0') {
      text.append(" (/dev/infiniband/").append(device.dev_name).append(")");
    }
    return text;
  }

  void skip(const std::string& device, unsigned port_num, Skip why) {
    survey.skipped.push_back({device, port_num, std::move(why.reason), why.cause});
  }

  Skip not_selected() const {
    return {SkipCause::kNotSelected, std::string("not selected by ") + config.hca.variable + "=" + config.hca.value};
  }

  Skip no_gid(const Device& device, std::uint8_t port_num, const ibv_port_attr& attributes, const Error& error) {
    if (error.sys_errno != ENODATA) return {SkipCause::kNoGid, "no usable GID"};
    survey.has_failed = true;
    const std::string filled = to_string(read_gid_table(verbs, device.context(), port_num, attributes));
    return {SkipCause::kGidSetting,
            "GID " + std::to_string(config.gid.for_device(device.name()).value_or(0)) + ", set by " +
                config.gid.variable + ", is empty or does not exist; not empty: " + (filled.empty() ? "none" : filled)};
  }

  // An index out of the table, or of an entry without a key: no QP could be used. Index 0 always has one.
  std::optional<Skip> no_pkey(const Device& device, std::uint8_t port_num, const ibv_port_attr& attributes) {
    const int index = config.pkey_index;
    if (index == 0) return std::nullopt;
    __be16 key = 0;
    const bool in_table = index < attributes.pkey_tbl_len;
    if (in_table && verbs.query_pkey(device.context(), port_num, index, &key) == 0 && key != 0) return std::nullopt;
    survey.has_failed = true;
    return Skip{SkipCause::kPkeySetting,
                "P_Key index " + std::to_string(index) + ", set by VERBATIM_PKEY or NCCL_IB_PKEY, is " +
                    (in_table ? "empty"
                              : "out of the table, which has " + std::to_string(attributes.pkey_tbl_len) +
                                    (attributes.pkey_tbl_len == 1 ? " entry" : " entries"))};
  }

  void add_port(Device& device, std::uint8_t port_num) {
    const HcaMatch match = filter.match(device.name(), port_num);
    if (!match.selected) return skip(device.name(), port_num, not_selected());
    const Result<ibv_port_attr> attributes = verbs.port_attributes(device.context(), port_num);
    if (!attributes) {
      survey.has_failed = true;
      return skip(device.name(), port_num,
                  {SkipCause::kQueryFailed,
                   std::string("ibv_query_port failed: ") + std::strerror(attributes.error().sys_errno)});
    }
    if (attributes->state != IBV_PORT_ACTIVE) return skip(device.name(), port_num, not_active(attributes->state));
    const Result<GidEntry> gid =
        choose_gid(verbs, device.context(), device.name().c_str(), port_num, *attributes, config.gid);
    if (!gid) return skip(device.name(), port_num, no_gid(device, port_num, *attributes, gid.error()));
    if (const auto no_key = no_pkey(device, port_num, *attributes)) return skip(device.name(), port_num, *no_key);

    Port port;
    port.device = &device;
    port.port_num = port_num;
    port.name = device.name() + ":" + std::to_string(port_num);
    port.nccl_name = std::string(kNcclNamePrefix) + device.name();
    if (port_num != 1) port.nccl_name += "_p" + std::to_string(port_num);
    port.speed_mbps = port_speed_mbps(device, port_num, *attributes);
    if (port.speed_mbps == 0) port.speed_mbps = kUnknownSpeedMbps;
    port.pci_path = sysfs_pci_path(device.sysfs_path());
    port.guid = be64toh(device.attributes().sys_image_guid);
    port.link_layer = attributes->link_layer;
    port.lid = attributes->lid;
    port.grh_required = (attributes->flags & IBV_QPF_GRH_REQUIRED) != 0;
    port.active_mtu = attributes->active_mtu;
    port.max_msg_bytes = attributes->max_msg_sz;
    port.ptr_support = ptr_support(device, survey.peer_memory);
    port.rail_id = match.rail_id;
    port.plane_id = match.plane_id;
    port.gid = *gid;
    port.adaptive_routing =
        config.adaptive_routing == Switch::kAuto ? !port.is_roce() : config.adaptive_routing == Switch::kOn;
    const bool has_data_direct = !device.data_direct_path().empty();
    if (!has_data_direct || config.data_direct == DataDirect::kBoth) survey.ports.push_back(port);
    if (!has_data_direct) return;
    port.nccl_name += "_dma";
    port.pci_path = device.data_direct_path();
    port.data_direct = true;
    survey.ports.push_back(std::move(port));
  }
};

// strverscmp compares numbers in names as numbers: mlx5_2 comes before mlx5_10.
bool sorts_before(const Port& a, const Port& b) {
  if (a.pci_path != b.pci_path) return a.pci_path < b.pci_path;
  if (const int order = strverscmp(a.device->name().c_str(), b.device->name().c_str()); order != 0) return order < 0;
  return a.port_num < b.port_num;
}

void number_ports(std::vector<Port>& ports) {
  for (auto port = ports.begin(); port != ports.end(); ++port) {
    port->topology_port = 1;
    for (auto earlier = ports.begin(); earlier != port; ++earlier) {
      if (earlier->guid != port->guid) continue;
      port->topology_port = std::max(port->topology_port, earlier->topology_port + 1);
      if (earlier->name != port->name) continue;
      port->topology_port = earlier->topology_port;  // the same port, with and without Data Direct
      break;
    }
  }
}

// "mlx5_0:1, mlx5_1:1: port is DOWN; mlx5_2: ...": grouped by reason, because a log line is at most 1,024 bytes long.
std::string group_by_reason(const std::vector<SkippedPort>& skipped) {
  std::vector<std::pair<std::string, std::string>> by_reason;  // reason, names
  for (const SkippedPort& port : skipped) {
    std::string name = port.device;
    if (port.port_num != 0) name.append(":").append(std::to_string(port.port_num));
    const auto known =
        std::find_if(by_reason.begin(), by_reason.end(), [&](const auto& entry) { return entry.first == port.reason; });
    if (known != by_reason.end()) {
      known->second.append(", ").append(name);
    } else {
      by_reason.emplace_back(port.reason, name);
    }
  }
  std::string text;
  for (const auto& [reason, names] : by_reason) {
    text.append(text.empty() ? "" : "; ").append(names).append(": ").append(reason);
  }
  return text;
}

// One line for all ports without GPU memory support: a warning if the host has an NVIDIA GPU, else information.
void log_missing_gpu_memory(const std::vector<Port>& ports, const std::string& root) {
  std::vector<SkippedPort> without;
  bool kernel_driver = false;
  for (const Port& port : ports) {
    if (port.ptr_support != kPtrHost) continue;
    kernel_driver = kernel_driver || has_kernel_driver(port.device->sysfs_path());
    without.push_back({port.device->name(), port.port_num, why_no_gpu_memory(*port.device)});
  }
  if (without.empty()) return;
  const bool gpu = sysfs_exists(root + "/sys/module/nvidia") && kernel_driver;
  log_line(gpu ? LogLevel::kWarn : LogLevel::kInfo, __FILE__, __LINE__,
           "GPU memory cannot be registered, so NCCL copies data through host memory. Next: load nvidia_peermem. %s",
           group_by_reason(without).c_str());
}

// What may end registrations of GPU memory, and objects of a device, later.
void log_limits(const DeviceSurvey& survey, const std::string& root) {
  for (const std::unique_ptr<Device>& device : survey.devices) {
    const std::string limit = rdma_control_group_limit(root, device->name());
    if (!limit.empty()) VERBATIM_INFO("the rdma control group limits %s to %s", device->name().c_str(), limit.c_str());
  }
  const std::uint64_t bar1 = smallest_gpu_bar1(root).value_or(kEnoughBar1Bytes);
  if (bar1 >= kEnoughBar1Bytes) return;
  VERBATIM_INFO(
      "a GPU of this host has a BAR1 of %" PRIu64
      " MiB: NICs reach at most so much of its memory at a time. Next: if registrations of GPU memory fail, enable a "
      "large BAR1 in the firmware of the host (Resizable BAR)",
      bar1 >> 20);
}

void log_port(const Port& port) {
  const char* gpu_memory[] = {"", ", GPU memory by peer memory", ", GPU memory by dma-buf",
                              ", GPU memory by peer memory or dma-buf"};
  VERBATIM_INFO("%s (for NCCL %s): %s %u Mb/s, GID %s, MTU %u, PCI %s%s%s%s", port.name.c_str(), port.nccl_name.c_str(),
                port.is_roce() ? "RoCE" : "InfiniBand", port.speed_mbps, to_string(std::span(&port.gid, 1)).c_str(),
                128U << static_cast<unsigned>(port.active_mtu), port.pci_path ? port.pci_path->c_str() : "none",
                gpu_memory[port.ptr_support >> 1], port.data_direct ? ", Data Direct" : "",
                port.device->relaxed_ordering() ? ", relaxed ordering" : "");
}

}  // namespace

Result<std::shared_ptr<const DeviceSurvey>> DeviceSurvey::open(const Verbs& verbs, const Config& config) {
  const std::optional<Mlx5> mlx5 = Mlx5::load(config.mlx5_library);
  return open(verbs, mlx5 ? &*mlx5 : nullptr, config, "");
}

Result<DeviceSurvey> DeviceSurvey::make(const Verbs& verbs, const Mlx5* mlx5, const Config& config,
                                        const std::string& root, Unused unused) {
  const Result<HcaFilter> filter = HcaFilter::parse(config.hca.value);
  if (!filter) {
    VERBATIM_WARN("%s=%s is not valid. Next: set [^][=]name[:port[:rail[:plane]]],...", config.hca.variable,
                  config.hca.value.c_str());
    return filter.error();
  }
  const bool can_relax = verbs.reg_mr_iova2 != nullptr;
  if (config.relaxed_ordering == Switch::kOn && !can_relax) {
    VERBATIM_WARN(
        "VERBATIM_RELAXED_ORDERING=1 (or NCCL_IB_PCI_RELAXED_ORDERING=1) is not possible: this libibverbs has no "
        "ibv_reg_mr_iova2. Next: set 0 or 2");
    return Error{ErrorKind::kUsage, EOPNOTSUPP, "ibv_reg_mr_iova2"};
  }
  // ibv_fork_init has an effect only before the first registration. A failure is no error, as in NCCL's own transport.
  if (const Status status = check_errno("ibv_fork_init", verbs.fork_init()); !status) {
    VERBATIM_INFO("ibv_fork_init failed: %s. A forked child must not access registered memory",
                  std::strerror(status.error().sys_errno));
  }

  int count = 0;
  const std::unique_ptr<ibv_device*, decltype(verbs.free_device_list)> list(verbs.get_device_list(&count),
                                                                            verbs.free_device_list);
  if (list == nullptr) {
    const int error = errno;
    VERBATIM_WARN("no RDMA: libibverbs cannot list devices: %s. Next: load the kernel's RDMA modules (ib_uverbs)",
                  std::strerror(error));
    return Error{ErrorKind::kUsage, error, "ibv_get_device_list"};
  }
  if (count == 0) {
    VERBATIM_WARN(
        "no RDMA: libibverbs finds no device. Next: in a container, check that /dev/infiniband and the provider "
        "libraries exist");
    return Error{ErrorKind::kUsage, ENODEV, "ibv_get_device_list"};
  }
  for (const auto& named : config.gid.per_device) {
    const auto has_name = [&](ibv_device* device) { return named.first == verbs.get_device_name(device); };
    if (std::none_of(list.get(), list.get() + count, has_name)) {
      VERBATIM_WARN("%s names %s, and no device has this name. Next: 'ibv_devices' lists the names",
                    config.gid.variable, named.first.c_str());
    }
  }

  DeviceSurvey survey;
  survey.peer_memory = peer_memory_loaded(root);
  DeviceEnumerator enumerator{.verbs = verbs,
                              .mlx5 = mlx5,
                              .config = config,
                              .filter = *filter,
                              .relaxed_ordering = can_relax && config.relaxed_ordering != Switch::kOff,
                              .unused = unused,
                              .survey = survey};
  for (int i = 0; i < count; ++i) enumerator.add_device(list.get()[i]);
  std::sort(survey.ports.begin(), survey.ports.end(), sorts_before);
  number_ports(survey.ports);
  return survey;
}

Result<std::shared_ptr<const DeviceSurvey>> DeviceSurvey::open(const Verbs& verbs, const Mlx5* mlx5,
                                                               const Config& config, const std::string& root) {
  Result<DeviceSurvey> made = DeviceSurvey::make(verbs, mlx5, config, root, DeviceSurvey::Unused::kClose);
  if (!made) return made.error();
  DeviceSurvey& survey = *made;
  if (survey.ports.empty()) {
    VERBATIM_WARN("no RDMA device is usable. %s. Next: 'verbatim-info' says what to do for each",
                  group_by_reason(survey.skipped).c_str());
    return Error{ErrorKind::kUsage, ENODEV, "RDMA devices"};
  }
  // A warning if an error or a setting costs bandwidth; a port that is not selected or not active is normal.
  if (!survey.skipped.empty()) {
    log_line(survey.has_failed ? LogLevel::kWarn : LogLevel::kInfo, __FILE__, __LINE__, "not used: %s",
             group_by_reason(survey.skipped).c_str());
  }
  for (const Port& port : survey.ports) log_port(port);
  log_missing_gpu_memory(survey.ports, root);
  log_limits(survey, root);

  return std::make_shared<const DeviceSurvey>(std::move(survey));
}

std::string next_step(const SkippedPort& skipped, const Config& config) {
  switch (skipped.cause) {
    case SkipCause::kNotSelected:
      return std::string("if it is to be used, select it with ") + config.hca.variable + ", or unset that";
    case SkipCause::kTransport:
      return "none: Verbatim needs InfiniBand or RoCE";
    case SkipCause::kOpenFailed:
      return "check that this user may read and write /dev/infiniband (in a container: pass the devices on), 'ulimit "
             "-l', and 'dmesg'";
    case SkipCause::kOpenLimited:
      return "compare hca_handle and hca_object of " + skipped.device +
             " in the file rdma.max of the control group with 'rdma resource show': the limit is reached, or the "
             "device has nothing left";
    case SkipCause::kQueryFailed:
      return "look for the driver's reason in 'dmesg'";
    case SkipCause::kPortDown:
      return "check the cable and the port of the switch; on RoCE also set its network interface up ('ip link')";
    case SkipCause::kNoSubnetManager:
      return "start a subnet manager (opensm), or check the one of the switch";
    case SkipCause::kNotActive:
      return "look at its state with ibv_devinfo";
    case SkipCause::kNoGid:
      return "give the network interface of the port an address ('ip addr')";
    case SkipCause::kGidSetting:
      return std::string("set ") + config.gid.variable + " to an entry that is not empty, or to auto";
    case SkipCause::kPkeySetting:
      return "unset VERBATIM_PKEY and NCCL_IB_PKEY; they are for InfiniBand partitions, and index 0 is the default key";
  }
  return {};
}

unsigned ptr_support(const Device& device, bool peer_memory) {
  unsigned support = kPtrHost;
  if (peer_memory && has_kernel_driver(device.sysfs_path())) support |= kPtrCuda;
  if (device.dmabuf_errno() == 0) support |= kPtrDmaBuf;
  return support;
}

std::string why_no_gpu_memory(const Device& device) {
  const int error = device.dmabuf_errno();
  return std::string("dma-buf: ") +
         (error == ENOSYS ? "this libibverbs has no ibv_reg_dmabuf_mr" : std::strerror(error)) + ", peer memory: " +
         (has_kernel_driver(device.sysfs_path()) ? "no module nvidia_peermem or nv_peer_mem"
                                                 : "the device has no kernel driver");
}

std::uint32_t port_speed_mbps(const Device& device, std::uint8_t port_num, const ibv_port_attr& attributes) {
  // Kernels report a speed above NDR as NDR, because `active_speed` has only 8 bits; sysfs has the speed itself.
  return std::max(port_speed_mbps(attributes.active_speed, attributes.active_width),
                  sysfs_port_speed_mbps(device.sysfs_path(), port_num).value_or(0));
}

std::uint32_t port_speed_mbps(std::uint8_t active_speed, std::uint8_t active_width) {
  // By the bit that is set in the code. SDR, DDR, QDR, FDR10, FDR, EDR, HDR, NDR; XDR needs more than 8 bits, so its
  // speed is read from sysfs.
  constexpr std::uint32_t kLaneMbps[] = {2'500, 5'000, 10'000, 10'000, 14'000, 25'000, 50'000, 100'000};
  constexpr std::uint32_t kLanes[] = {1, 4, 8, 12, 2};
  if (!std::has_single_bit(active_speed) || !std::has_single_bit(active_width)) return 0;
  const auto width = static_cast<std::size_t>(std::countr_zero(active_width));
  return width < std::size(kLanes) ? kLanes[width] * kLaneMbps[std::countr_zero(active_speed)] : 0;
}

}  // namespace verbatim
