#include "base/socket_interface.h"

#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/log.h"
#include "base/socket.h"

namespace verbatim {
namespace {

struct NameList {
  std::vector<std::string_view> names;
  bool exclude = false;
  bool exact = false;
};

bool take_prefix(std::string_view& text, char prefix) {
  if (text.empty() || text.front() != prefix) return false;
  text.remove_prefix(1);
  return true;
}

NameList parse_name_list(std::string_view text) {
  NameList list;
  list.exclude = take_prefix(text, '^');
  list.exact = take_prefix(text, '=');
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    if (comma > 0) list.names.push_back(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return list;
}

bool selects(const NameList& list, std::string_view name) {
  const bool named = std::any_of(list.names.begin(), list.names.end(), [&](std::string_view wanted) {
    return list.exact ? name == wanted : name.starts_with(wanted);
  });
  return named != list.exclude;
}

// A lower rank is preferred.
int address_rank(const SocketInterface& candidate) {
  if (candidate.address.ss_family == AF_INET) return 0;
  return IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6&>(candidate.address).sin6_addr) ? 2 : 1;
}

std::optional<SocketInterface> choose(std::span<const SocketInterface> interfaces, const NameList& list, int family) {
  const auto fits = [&](const SocketInterface& candidate) {
    return (family == AF_UNSPEC || candidate.address.ss_family == family) && selects(list, candidate.name);
  };
  const auto first = std::find_if(interfaces.begin(), interfaces.end(), fits);
  if (first == interfaces.end()) return std::nullopt;
  const SocketInterface* best = &*first;
  for (const SocketInterface& candidate : interfaces) {
    const bool same = candidate.name == best->name && fits(candidate);
    if (same && address_rank(candidate) < address_rank(*best)) best = &candidate;
  }
  return *best;
}

constexpr const char* kNetworkInterfaces = "^docker,lo,virbr";
// Tried in this order when no list is set.
constexpr const char* kDefaultLists[] = {"ib", kNetworkInterfaces, "docker,virbr", "lo"};

std::span<const std::uint8_t> ip_of(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET6) {
    return std::span(reinterpret_cast<const sockaddr_in6&>(address).sin6_addr.s6_addr);
  }
  const in_addr& v4 = reinterpret_cast<const sockaddr_in&>(address).sin_addr;
  return {reinterpret_cast<const std::uint8_t*>(&v4), sizeof v4};
}

bool same_host(const sockaddr_storage& a, const sockaddr_storage& b) {
  return a.ss_family == b.ss_family && std::ranges::equal(ip_of(a), ip_of(b));
}

bool is_in_subnet(const sockaddr_storage& remote, const SocketInterface& own) {
  if (remote.ss_family != own.address.ss_family) return false;
  const auto here = ip_of(own.address);
  const auto there = ip_of(remote);
  const auto* mask =
      own.address.ss_family == AF_INET6
          ? reinterpret_cast<const sockaddr_in6&>(own.netmask).sin6_addr.s6_addr
          : reinterpret_cast<const std::uint8_t*>(&reinterpret_cast<const sockaddr_in&>(own.netmask).sin_addr);
  bool has_mask = false;
  for (std::size_t i = 0; i < here.size(); ++i) {
    has_mask = has_mask || mask[i] != 0;
    if (((here[i] ^ there[i]) & mask[i]) != 0) return false;
  }
  return has_mask;
}

}  // namespace

Result<std::vector<SocketInterface>> list_socket_interfaces() {
  ifaddrs* head = nullptr;
  if (getifaddrs(&head) != 0) return system_error("getifaddrs", errno);
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(head, freeifaddrs);
  std::vector<SocketInterface> found;
  for (const ifaddrs* entry = head; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    constexpr unsigned kUsable = IFF_UP | IFF_RUNNING;
    if ((entry->ifa_flags & kUsable) != kUsable) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    SocketInterface usable;
    usable.name = entry->ifa_name;
    const std::size_t bytes = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&usable.address, entry->ifa_addr, bytes);
    if (entry->ifa_netmask != nullptr) std::memcpy(&usable.netmask, entry->ifa_netmask, bytes);
    found.push_back(usable);
  }
  return found;
}

std::optional<SocketInterface> choose_socket_interface(std::span<const SocketInterface> interfaces,
                                                       std::string_view ifname_list, int family) {
  if (!ifname_list.empty()) return choose(interfaces, parse_name_list(ifname_list), family);
  for (const char* list : kDefaultLists) {
    if (auto chosen = choose(interfaces, parse_name_list(list), family)) return chosen;
  }
  return std::nullopt;
}

std::vector<SocketInterface> all_socket_interfaces(std::span<const SocketInterface> interfaces,
                                                   std::string_view ifname_list, int family) {
  const std::optional<SocketInterface> chosen = choose_socket_interface(interfaces, ifname_list, family);
  if (!chosen) return {};
  const NameList list = parse_name_list(ifname_list.empty() ? kNetworkInterfaces : ifname_list);
  std::vector<SocketInterface> all{*chosen};
  for (const SocketInterface& candidate : interfaces) {
    constexpr int kLinkLocalRank = 2;
    const bool fits = family == AF_UNSPEC || candidate.address.ss_family == family;
    if (!fits || candidate.name == chosen->name || !selects(list, candidate.name)) continue;
    if (address_rank(candidate) == kLinkLocalRank) continue;
    const auto same = std::ranges::find(all, candidate.name, &SocketInterface::name);
    if (same == all.end()) {
      all.push_back(candidate);
    } else if (address_rank(candidate) < address_rank(*same)) {
      *same = candidate;
    }
  }
  return all;
}

std::optional<sockaddr_storage> address_in_subnet_of(const sockaddr_storage& remote,
                                                     std::span<const SocketInterface> interfaces,
                                                     const sockaddr_storage& except) {
  for (const SocketInterface& own : interfaces) {
    if (is_in_subnet(remote, own) && !same_host(own.address, except)) return own.address;
  }
  return std::nullopt;
}

Result<SocketInterface> choose_socket_interface(const Config& config) {
  Result<std::vector<SocketInterface>> interfaces = list_socket_interfaces();
  if (!interfaces) {
    VERBATIM_WARN("cannot list the network interfaces: %s", std::strerror(interfaces.error().sys_errno));
    return interfaces.error();
  }
  if (auto chosen = choose_socket_interface(*interfaces, config.socket_ifname.value, config.socket_family)) {
    return *chosen;
  }
  std::string present;
  for (const SocketInterface& candidate : *interfaces)
    present.append(present.empty() ? "" : ", ").append(to_string(candidate));
  const bool listed = !config.socket_ifname.value.empty();
  VERBATIM_WARN(
      "no network interface for the TCP side channel%s%s%s%s; running interfaces: %s. Next: name one of these in "
      "VERBATIM_SOCKET_IFNAME, or look at 'ip link'",
      listed ? " under " : "", listed ? config.socket_ifname.variable : "", listed ? "=" : "",
      config.socket_ifname.value.c_str(), present.empty() ? "none" : present.c_str());
  return Error{ErrorKind::kUsage, ENODEV, "socket interface"};
}

std::string to_string(const SocketInterface& socket_interface) {
  return socket_interface.name + " " + host_to_string(socket_interface.address);
}

}  // namespace verbatim
