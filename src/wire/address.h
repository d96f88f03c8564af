// Where a process can be reached for a side channel, as a message has it.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>

namespace verbatim::wire {

// Never a link-local IPv6 address: its scope is known only on its own host.
struct Address {
  std::array<std::uint8_t, 16> ip{};  // IPv6, or IPv4 as ::ffff:a.b.c.d, as in a GID
  std::uint16_t port = 0;

  bool operator==(const Address&) const = default;
};

// Of AF_INET or AF_INET6.
Address to_address(const sockaddr_storage& socket_address);
sockaddr_storage to_sockaddr(const Address& address);

}  // namespace verbatim::wire
