// The TCP connections of a process that is connected with itself.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "base/socket.h"
#include "connected_comms.h"

namespace verbatim {

// Ends the TCP connection with an error at both ends.
inline void reset(Comm& comm) {
  reset_connection(comm.channel().socket());
}

// The listening socket of this process.
inline int listening_socket(ConnectedComms& link) {
  const in_port_t port = htons(link.send().endpoint().remote().addresses.at(0).port);
  for (int fd = 0; fd < 1024; ++fd) {
    int listens = 0;
    socklen_t bytes = sizeof listens;
    sockaddr_in own{};
    socklen_t own_bytes = sizeof own;
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) != 0 || listens == 0) continue;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_bytes) != 0 || own.sin_family != AF_INET) continue;
    if (own.sin_port == port) return fd;
  }
  return -1;
}

}  // namespace verbatim
