#include "wire/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <cstring>

namespace verbatim::wire {
namespace {

constexpr std::size_t kIpv4Offset = 12;  // in ::ffff:a.b.c.d

}  // namespace

Address to_address(const sockaddr_storage& socket_address) {
  Address address;
  if (socket_address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(socket_address);
    std::memcpy(address.ip.data(), &v6.sin6_addr, sizeof v6.sin6_addr);
    address.port = ntohs(v6.sin6_port);
    return address;
  }
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(socket_address);
  address.ip[kIpv4Offset - 2] = address.ip[kIpv4Offset - 1] = 0xff;
  std::memcpy(address.ip.data() + kIpv4Offset, &v4.sin_addr, sizeof v4.sin_addr);
  address.port = ntohs(v4.sin_port);
  return address;
}

sockaddr_storage to_sockaddr(const Address& address) {
  sockaddr_storage socket_address{};
  in6_addr ip{};
  std::memcpy(&ip, address.ip.data(), sizeof ip);
  if (IN6_IS_ADDR_V4MAPPED(&ip)) {
    auto& v4 = reinterpret_cast<sockaddr_in&>(socket_address);
    v4.sin_family = AF_INET;
    v4.sin_port = htons(address.port);
    std::memcpy(&v4.sin_addr, address.ip.data() + kIpv4Offset, sizeof v4.sin_addr);
  } else {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(socket_address);
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(address.port);
    v6.sin6_addr = ip;
  }
  return socket_address;
}

}  // namespace verbatim::wire
