#include "softverbs/host/device_attributes.h"

#include <endian.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <string_view>

namespace verbatim::softverbs {
namespace {

constexpr std::uint64_t kFirstGuid = 0x0253'5654'fffe'0001;  // locally administered
constexpr std::uint64_t kLinkLocalPrefix = 0xfe80'0000'0000'0000;
constexpr std::uint64_t kSiteLocalPrefix = 0xfec0'0000'0000'0000;
constexpr std::uint32_t kFlushDelayNs = 20'000'000;  // as irdma's IRDMA_FLUSH_DELAY_MS
constexpr std::uint32_t kFirstFlid = 0x8000;         // no LID of a device is as large
constexpr std::uint8_t kPhysicalDisabled = 3;
constexpr std::uint8_t kPhysicalLinkUp = 5;

struct Speed {
  std::uint32_t gbps;
  std::uint8_t width;  // the encodings of ibv_port_attr
  std::uint8_t speed;
};

constexpr std::array kSpeeds{
    Speed{10, 1, 4},   Speed{25, 1, 32},  Speed{40, 2, 4},    Speed{50, 1, 64},
    Speed{100, 2, 32}, Speed{200, 2, 64}, Speed{400, 2, 128}, Speed{800, 4, 128},
};

ibv_gid gid_with_prefix(std::uint64_t prefix, std::uint32_t device) {
  ibv_gid gid{};
  gid.global.subnet_prefix = htobe64(prefix);
  gid.global.interface_id = device_guid(device);
  return gid;
}

ibv_gid link_local_gid(std::uint32_t device) {
  return gid_with_prefix(kLinkLocalPrefix, device);
}

// 10.77.D.1
ibv_gid ipv4_gid(std::uint32_t device) {
  ibv_gid gid{};
  gid.raw[10] = gid.raw[11] = 0xff;
  gid.raw[12] = 10;
  gid.raw[13] = 77;
  gid.raw[14] = static_cast<std::uint8_t>(device);
  gid.raw[15] = 1;
  return gid;
}

}  // namespace

ibv_mtu mtu_of(std::uint32_t bytes) {
  return static_cast<ibv_mtu>(std::countr_zero(bytes) - 7);
}

std::string invented_pci_path(const std::string& address) {
  return "/sys/devices/pci" + address.substr(0, std::string_view("0000:00").size()) + "/" + address;
}

__be64 device_guid(std::uint32_t device) {
  return htobe64(kFirstGuid + device);
}

void fill_port(SharedPort& port, std::uint32_t device, const Settings& settings) {
  port.ethernet = settings.ethernet ? 1 : 0;
  port.excludes_own_atomics = settings.atomics == Atomics::kDevice ? 1 : 0;
  port.refuses_gpu_atomics = settings.has_gpu_atomics ? 0 : 1;
  port.flush_delay_ns = settings.flushes_late ? kFlushDelayNs : 0;
  port.lid = settings.ethernet ? 0 : device + 1;
  const ibv_gid local = link_local_gid(device);
  const ibv_gid ipv4 = ipv4_gid(device);
  SharedGid* const gids = port.gid_tables[0];
  if (!settings.ethernet) {
    gids[0] = {local, IBV_GID_TYPE_IB, 1};
    port.grh_required = settings.grh_required ? 1 : 0;
    if (settings.subnets == 1) return;
    port.subnet = 1 + device % settings.subnets;
    port.flid = kFirstFlid + device;
    gids[0] = {gid_with_prefix(kSiteLocalPrefix | port.subnet, device), IBV_GID_TYPE_IB, 1};
    gids[1] = {gid_with_prefix(kSiteLocalPrefix | std::uint64_t{port.flid} << 16 | port.subnet, device),
               IBV_GID_TYPE_IB, 1};
    return;
  }
  gids[0] = {local, IBV_GID_TYPE_ROCE_V1, 1};
  gids[1] = {local, IBV_GID_TYPE_ROCE_V2, 1};
  gids[2] = {ipv4, IBV_GID_TYPE_ROCE_V1, 1};
  gids[3] = {ipv4, IBV_GID_TYPE_ROCE_V2, 1};
}

void change_gid(SharedPort& port, std::uint32_t index, const SharedGid& gid) {
  const std::uint32_t changes = port.gid_changes.load(std::memory_order_relaxed);
  SharedGid* const next = port.gid_tables[(changes + 1) % kGidTables];
  std::copy_n(port.gids(), kGidTableLength, next);
  next[index] = gid;
  port.gid_changes.store(changes + 1, std::memory_order_release);
}

ibv_device_attr device_attributes(std::uint32_t device, const Settings& settings) {
  const auto limit = [](std::uint32_t value) { return static_cast<int>(value); };
  ibv_device_attr attributes{};
  std::snprintf(attributes.fw_ver, sizeof attributes.fw_ver, "softverbs");
  attributes.node_guid = device_guid(device);
  attributes.sys_image_guid = device_guid(device);
  attributes.vendor_id = settings.vendor_id;
  attributes.vendor_part_id = settings.vendor_part_id;
  attributes.max_mr_size = ~std::uint64_t{0};
  attributes.page_size_cap = ~std::uint64_t{kPageBytes - 1};
  attributes.max_qp = limit(settings.max_qp);
  attributes.max_qp_wr = limit(settings.max_qp_wr);
  attributes.device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_SYS_IMAGE_GUID | IBV_DEVICE_PORT_ACTIVE_EVENT;
  attributes.max_sge = limit(settings.max_sge);
  attributes.max_sge_rd = limit(settings.max_sge);
  attributes.max_cq = limit(settings.max_cq);
  attributes.max_cqe = limit(settings.max_cqe);
  attributes.max_mr = limit(settings.max_mr);
  attributes.max_pd = limit(settings.max_pd);
  attributes.max_qp_rd_atom = kMaxRdAtomic;
  attributes.max_res_rd_atom = kMaxRdAtomic * limit(settings.max_qp);
  attributes.max_qp_init_rd_atom = kMaxRdAtomic;
  attributes.atomic_cap = settings.atomics == Atomics::kGlob ? IBV_ATOMIC_GLOB : IBV_ATOMIC_HCA;
  attributes.max_srq = limit(settings.max_srq);
  attributes.max_srq_wr = limit(settings.max_srq_wr);
  attributes.max_srq_sge = limit(settings.max_sge);
  attributes.max_ah = kMaxAhs;
  attributes.max_pkeys = kPkeyTableLength;
  attributes.phys_port_cnt = 1;
  return attributes;
}

ibv_device_attr_ex extended_device_attributes(std::uint32_t device, const Settings& settings) {
  ibv_device_attr_ex attributes{};
  attributes.orig_attr = device_attributes(device, settings);
  attributes.completion_timestamp_mask = ~std::uint64_t{0};
  attributes.hca_core_clock = kClockKhz;
  attributes.device_cap_flags_ex = attributes.orig_attr.device_cap_flags;
  attributes.phys_port_cnt_ex = attributes.orig_attr.phys_port_cnt;
  return attributes;
}

ibv_port_attr port_attributes(const SharedPort& port, std::uint32_t device, const Settings& settings) {
  ibv_port_attr attributes{};
  const bool is_down = port.link_down.load(std::memory_order_acquire) != 0;
  attributes.state = is_down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
  attributes.max_mtu = mtu_of(settings.mtu_bytes);
  attributes.active_mtu = mtu_of(settings.mtu_bytes);
  attributes.gid_tbl_len = kGidTableLength;
  attributes.port_cap_flags = IBV_PORT_CM_SUP;
  if (port.ethernet != 0) attributes.port_cap_flags |= IBV_PORT_IP_BASED_GIDS;
  if (port.grh_required != 0) attributes.flags |= IBV_QPF_GRH_REQUIRED;
  attributes.max_msg_sz = settings.max_msg_bytes;
  attributes.pkey_tbl_len = kPkeyTableLength;
  attributes.lid = static_cast<std::uint16_t>(port.lid);
  attributes.sm_lid = port.ethernet != 0 ? 0 : 1;
  attributes.max_vl_num = 1;
  attributes.phys_state = is_down ? kPhysicalDisabled : kPhysicalLinkUp;
  attributes.link_layer = port.ethernet != 0 ? IBV_LINK_LAYER_ETHERNET : IBV_LINK_LAYER_INFINIBAND;
  for (const Speed& speed : kSpeeds) {
    if (speed.gbps != settings.speed_gbps[device]) continue;
    attributes.active_width = speed.width;
    attributes.active_speed = speed.speed;
  }
  return attributes;
}

}  // namespace verbatim::softverbs
