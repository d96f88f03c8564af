// A listening socket that refuses connections for a while. It is bound again at once, so that hardly any other socket
// gets its port.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace verbatim::test {

inline void refuse_connections(int listener) {
  sockaddr_storage address{};
  socklen_t bytes = sizeof address;
  ASSERT_EQ(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &bytes), 0) << std::strerror(errno);
  ASSERT_EQ(::shutdown(listener, SHUT_RDWR), 0) << std::strerror(errno);
  const int reuse = 1;
  ASSERT_EQ(::setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse), 0) << std::strerror(errno);
  // EINVAL: shutdown has not released the port, because the kernel had not chosen it.
  const int bound = ::bind(listener, reinterpret_cast<const sockaddr*>(&address), bytes);
  ASSERT_TRUE(bound == 0 || errno == EINVAL) << std::strerror(errno);
}

inline void accept_connections(int listener) {
  ASSERT_EQ(::listen(listener, 16), 0) << std::strerror(errno);
}

}  // namespace verbatim::test
