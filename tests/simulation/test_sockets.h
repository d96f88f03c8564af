// What tests do with sockets.
#pragma once

#include <poll.h>
#include <sys/socket.h>

namespace simulation {

constexpr int kStream = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;

// The events of `fd`, once there is one of these or the time has passed.
inline short wait_for(int fd, short events, int timeout_ms = -1) {
  pollfd one{fd, events, 0};
  ::poll(&one, 1, timeout_ms);
  return one.revents;
}

}  // namespace simulation
