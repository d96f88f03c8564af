// The attributes of the devices, of their ports and the GID tables, as the query verbs return them.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <string>

#include "softverbs/host/layout.h"
#include "softverbs/host/settings.h"

namespace verbatim::softverbs {

constexpr std::uint8_t kPortNumber = 1;
constexpr std::uint16_t kPkeyTableLength = 1;
constexpr int kMaxAhs = 1 << 16;  // of a process
constexpr std::uint16_t kDefaultPkey = 0xffff;
constexpr std::uint8_t kMaxRdAtomic = 16;

constexpr std::uint32_t mtu_bytes(ibv_mtu mtu) {
  return 128U << mtu;
}
ibv_mtu mtu_of(std::uint32_t bytes);

// Of a PCI device that the machine does not have.
std::string invented_pci_path(const std::string& address);

// In network order. A device has the same GUID in every process of the host.
__be64 device_guid(std::uint32_t device);

// On RoCE, the entries before it are of the device itself, and those from it on are of the addresses of its interface.
constexpr std::uint32_t kFirstAddressGid = 2;

// RoCE: the link-local and the IPv4-mapped address, each as v1 and v2; the other entries are empty. IB: one GID, and
// with several subnets (device d is in subnet d modulo their number) one with an FLID.
void fill_port(SharedPort& port, std::uint32_t device, const Settings& settings);
// Changes one entry of the GID table. Callers must not run concurrently.
void change_gid(SharedPort& port, std::uint32_t index, const SharedGid& gid);

ibv_device_attr device_attributes(std::uint32_t device, const Settings& settings);
// Timestamps are in nanoseconds.
constexpr std::uint64_t kClockKhz = 1'000'000;
ibv_device_attr_ex extended_device_attributes(std::uint32_t device, const Settings& settings);
ibv_port_attr port_attributes(const SharedPort& port, std::uint32_t device, const Settings& settings);

}  // namespace verbatim::softverbs
