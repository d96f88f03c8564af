#include "net/context/net_devices.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace verbatim {
namespace {

constexpr const char* kNextForced = "Next: name other devices in NCCL_NET_FORCE_MERGE, or unset it";

// Both arguments have the same devices, in any order.
bool is_same_set(std::span<const int> a, std::span<const int> b) {
  return a.size() == b.size() && std::is_permutation(a.begin(), a.end(), b.begin());
}

Error refused() {
  return {ErrorKind::kUsage, 0, "makeVDevice", true};
}

}  // namespace

std::size_t NetDevices::count() const {
  const MutexLock lock(mutex_);
  return physical_.size() + virtual_.size();
}

Result<std::vector<const Port*>> NetDevices::ports(std::size_t device) const {
  const MutexLock lock(mutex_);
  is_used_ = true;
  if (device < physical_.size()) return std::vector<const Port*>{&physical_[device]};
  const std::size_t index = device - physical_.size();
  if (index >= virtual_.size()) return Error{ErrorKind::kArgument, 0, "no such device"};
  std::vector<const Port*> ports;
  for (const int member : virtual_[index]) ports.push_back(&physical_[static_cast<std::size_t>(member)]);
  return ports;
}

std::vector<const Port*> NetDevices::merged_with(std::size_t device) const {
  std::vector<const Port*> ports = {&physical_[device]};
  const MutexLock lock(mutex_);
  for (const std::vector<int>& members : virtual_) {
    const auto own = std::find(members.begin(), members.end(), static_cast<int>(device));
    if (own == members.end()) continue;
    // Those behind it first, so that two ranks on the two ports of a NIC pair them alike.
    for (auto other = own + 1; other != members.end(); ++other)
      ports.push_back(&physical_[static_cast<std::size_t>(*other)]);
    for (auto other = members.begin(); other != own; ++other)
      ports.push_back(&physical_[static_cast<std::size_t>(*other)]);
    return ports;
  }
  return ports;
}

std::vector<int> NetDevices::members(std::size_t device) const {
  if (device < physical_.size()) return {static_cast<int>(device)};
  const MutexLock lock(mutex_);
  return virtual_[device - physical_.size()];
}

Status NetDevices::check(std::span<const int> members) const {
  const std::size_t devices = physical_.size();
  for (std::size_t i = 0; i < members.size(); ++i) {
    const int member = members[i];
    if (member < 0 || static_cast<std::size_t>(member) >= devices + virtual_.size()) {
      VERBATIM_WARN("devices are not merged: there is no device %d, only 0 to %zu. %s", member, devices - 1,
                    kNextForced);
      return refused();
    }
    if (static_cast<std::size_t>(member) >= devices) {
      VERBATIM_WARN("devices are not merged: device %d is a merged one itself, only 0 to %zu can be merged. %s", member,
                    devices - 1, kNextForced);
      return refused();
    }
    const Port& first = physical_[static_cast<std::size_t>(members.front())];
    const Port& port = physical_[static_cast<std::size_t>(member)];
    // Also the same port with and without Data Direct.
    const auto earlier = members.first(i);
    if (std::any_of(earlier.begin(), earlier.end(),
                    [&](int other) { return physical_[static_cast<std::size_t>(other)].name == port.name; })) {
      VERBATIM_WARN("devices are not merged: device %d (%s) is named twice. %s", member, port.name.c_str(),
                    kNextForced);
      return refused();
    }
    if (port.is_roce() != first.is_roce()) {
      VERBATIM_WARN(
          "devices are not merged: %s is %s and %s is %s, which cannot reach the same peers. Next: select devices of "
          "one kind with VERBATIM_HCA",
          first.name.c_str(), first.is_roce() ? "RoCE" : "InfiniBand", port.name.c_str(),
          port.is_roce() ? "RoCE" : "InfiniBand");
      return refused();
    }
  }
  return {};
}

Result<std::size_t> NetDevices::merge(std::span<const int> members) {
  const MutexLock lock(mutex_);
  is_used_ = true;
  if (const Status possible = check(members); !possible) return possible.error();
  if (members.size() == 1) return static_cast<std::size_t>(members.front());
  const auto known = std::find_if(virtual_.begin(), virtual_.end(),
                                  [&](const std::vector<int>& one) { return is_same_set(one, members); });
  const auto device = physical_.size() + static_cast<std::size_t>(known - virtual_.begin());
  if (known == virtual_.end()) virtual_.emplace_back(members.begin(), members.end());
  return device;
}

std::vector<std::string> NetDevices::port_names() const {
  std::vector<std::string> names;
  for (const Port& port : physical_) names.push_back(port.nccl_name);
  return names;
}

NetDevices::Table NetDevices::table() const {
  const MutexLock lock(mutex_);
  return {port_names(), virtual_};
}

void NetDevices::restore(const Table& table) {
  if (table.ports != port_names()) {
    const auto join = [](const std::vector<std::string>& names) {
      std::string text;
      for (const std::string& name : names) text.append(text.empty() ? "" : ", ").append(name);
      return text;
    };
    return VERBATIM_WARN(
        "merged devices are not made again, because other ports can be used than when NCCL merged them: %s now, %s "
        "then. Next: restart the job when all ports are up",
        join(port_names()).c_str(), join(table.ports).c_str());
  }
  const MutexLock lock(mutex_);
  virtual_ = table.virtual_devices;
  is_used_ = false;
}

bool NetDevices::remove_unused() {
  const MutexLock lock(mutex_);
  if (is_used_ || virtual_.empty()) return false;
  virtual_.clear();
  return true;
}

std::string virtual_device_name(std::span<const Port* const> ports, std::size_t device) {
  const std::string& first = ports.front()->nccl_name;
  std::string name = first;
  for (const Port* port : ports.subspan(1)) name.append("+").append(port->nccl_name.substr(kNcclNamePrefix.size()));
  if (name.size() <= kMaxDeviceName) return name;
  return "verbatim_" + std::to_string(ports.size()) + "_ports_" + std::to_string(device);
}

}  // namespace verbatim
