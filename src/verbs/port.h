// A port of an RDMA device, and a way to GPU memory: NCCL calls it a network device.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "verbs/gid.h"

namespace verbatim {

class Device;

// The types of memory that a port's device can access; the values are those of NCCL_PTR_*.
enum PtrSupport : unsigned { kPtrHost = 0x1, kPtrCuda = 0x2, kPtrDmaBuf = 0x4 };

// Before the name of the verbs device in Port::nccl_name.
inline constexpr std::string_view kNcclNamePrefix = "verbatim_";

// One active port of one device. Owned by the DeviceSurvey, immutable after open.
struct Port {
  Device* device = nullptr;
  std::uint8_t port_num = 1;

  std::string name;  // "mlx5_0:1", for people: the verbs device and the port, as in VERBATIM_HCA
  // "verbatim_mlx5_0"; "verbatim_mlx5_0_p2" for port 2, because NCCL's topology needs a unique name for each port. The
  // suffix depends only on the port number, so a port that is down does not change the names of other ports.
  // "verbatim_mlx5_0_dma" for Data Direct.
  std::string nccl_name;
  std::uint32_t speed_mbps = 0;
  // See sysfs_pci_path; nullopt: not a PCI device. For Data Direct the interface's.
  std::optional<std::string> pci_path;
  std::uint64_t guid = 0;  // system image GUID of the NIC, host byte order
  // Unique among the ports of one NIC, but equal with and without Data Direct: NCCL shares bandwidth by (guid, port).
  std::uint32_t topology_port = 1;
  std::uint8_t link_layer = IBV_LINK_LAYER_UNSPECIFIED;
  std::uint16_t lid = 0;
  bool grh_required = false;  // InfiniBand: packets of this port and to it must have a GRH (virtual functions)
  ibv_mtu active_mtu = IBV_MTU_256;
  std::uint64_t max_msg_bytes = 0;
  unsigned ptr_support = kPtrHost;
  // dma-bufs are registered for the Data Direct interface of the device, so that its writes to GPU memory do not pass
  // where its completions pass. The same port may be in use without it too.
  bool data_direct = false;
  int rail_id = -1;  // -1: unset
  int plane_id = -1;
  GidEntry gid;
  bool adaptive_routing = false;  // Config::adaptive_routing; kAuto is decided by the link layer

  bool is_roce() const { return link_layer == IBV_LINK_LAYER_ETHERNET; }
};

// "mlx5_0:1", of several ports "mlx5_0:1+mlx5_1:1", for people.
inline std::string join_names(std::span<const Port* const> ports) {
  std::string names;
  for (const Port* port : ports) names.append(names.empty() ? "" : "+").append(port->name);
  return names;
}

}  // namespace verbatim
