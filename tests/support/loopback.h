// An address of this host's loopback interface.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>

namespace verbatim::test {

// 127.0.0.`number`, of which Linux has all on its loopback interface. Port 0.
inline sockaddr_storage loopback(std::uint32_t number = 1) {
  sockaddr_storage address{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(address);
  v4.sin_family = AF_INET;
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + number);
  return address;
}

}  // namespace verbatim::test
