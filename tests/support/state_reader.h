// A reader of VERBATIM_STATE_SOCKET.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <string>

#include "base/unique_fd.h"

namespace verbatim {

inline sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  return address;
}

inline UniqueFd connect_to(const std::string& path) {
  UniqueFd reader(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_un address = address_of(path);
  EXPECT_EQ(::connect(reader.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  return reader;
}

inline std::string read_all(const UniqueFd& reader) {
  std::string text;
  char some[4096];
  while (const ssize_t count = ::read(reader.get(), some, sizeof some)) {
    if (count < 0) return "no answer";
    text.append(some, static_cast<std::size_t>(count));
  }
  return text;
}

inline std::string read_state(const std::string& path) {
  return read_all(connect_to(path));
}

}  // namespace verbatim
