// Chooses the local address from which the TCP side channel listens and connects, by the rules of NCCL_SOCKET_IFNAME.
// A list `a,b` selects the interfaces whose names start with a or b, `=a,b` those with exactly these names; `^` before
// the list excludes these interfaces and selects all others. Without a list: interfaces that start with "ib", else any
// that is neither loopback nor a container or VM bridge (docker, virbr), else those bridges, else loopback.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/config.h"
#include "base/result.h"

namespace verbatim {

// One address of one running interface. The port of `address` is 0. A link-local IPv6 address has its scope ID.
struct SocketInterface {
  std::string name;
  sockaddr_storage address = {};
  sockaddr_storage netmask = {};
};

// Every IPv4 and IPv6 address of the interfaces that are up and running, in the kernel's order.
Result<std::vector<SocketInterface>> list_socket_interfaces();

// The address to use, nullopt when no interface matches. A pure function. Of the addresses of the first matching
// interface, IPv4 is preferred, then global IPv6, then link-local. `family` is AF_UNSPEC, AF_INET or AF_INET6.
std::optional<SocketInterface> choose_socket_interface(std::span<const SocketInterface> interfaces,
                                                       std::string_view ifname_list, int family);

// That address, and one of each further interface under which other hosts may reach this process: of those that the
// list selects, without a list of those that are neither loopback nor a bridge. No further one is link-local. Empty
// when no interface matches. A pure function.
std::vector<SocketInterface> all_socket_interfaces(std::span<const SocketInterface> interfaces,
                                                   std::string_view ifname_list, int family);

// The address in the subnet of `remote`, other than `except`. A pure function.
std::optional<sockaddr_storage> address_in_subnet_of(const sockaddr_storage& remote,
                                                     std::span<const SocketInterface> interfaces,
                                                     const sockaddr_storage& except);

// Lists the interfaces and chooses by `config`. A failure is logged with the running interfaces.
Result<SocketInterface> choose_socket_interface(const Config& config);

// "eth0 10.0.0.1", "eth0 fe80::1%2": for log lines.
std::string to_string(const SocketInterface& socket_interface);

}  // namespace verbatim
