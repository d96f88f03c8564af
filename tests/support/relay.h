// What lies between two processes in a test: their TCP connections go over it. It passes bytes on when the test says
// so, keeps them, and can cut a connection after any byte.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/socket.h"
#include "base/unique_fd.h"
#include "support/loopback.h"

namespace verbatim::test {

class Relay {
 public:
  // By the ends of the connections, 0 and 1.
  struct Connection {
    std::array<UniqueFd, 2> sockets = {};                     // to each end
    std::array<std::vector<std::uint8_t>, 2> passed_on = {};  // what each end has sent
  };

  // Connections to the returned address, which the other end makes, go to `listener` of this end.
  sockaddr_storage add(std::size_t end, const sockaddr_storage& listener) {
    Result<UniqueFd> listening = tcp_listen(loopback());
    EXPECT_TRUE(listening);
    if (!listening) return {};
    ways_.push_back({end, listener, std::move(*listening)});
    return *local_address(ways_.back().listening);
  }

  void pass_on() {
    for (const Way& way : ways_) {
      for (Result<std::optional<UniqueFd>> next = tcp_accept(way.listening); next && *next;
           next = tcp_accept(way.listening)) {
        Result<UniqueFd> made = tcp_connect(way.listener, {});
        EXPECT_TRUE(made);
        if (!made) return;
        Connection& connection = connections_.emplace_back();
        connection.sockets[way.end] = std::move(*made);
        connection.sockets[1 - way.end] = std::move(**next);
      }
    }
    for (Connection& connection : connections_) {
      for (const std::size_t end : {0U, 1U}) pass_on(connection, end);
    }
  }

  // What the end has sent on the last connection since the last call, which is not passed on.
  std::vector<std::uint8_t> take(std::size_t end) {
    std::vector<std::uint8_t> bytes(4096);
    const ssize_t count = ::recv(connections_.back().sockets[end].get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    bytes.resize(count < 0 ? 0 : static_cast<std::size_t>(count));
    return bytes;
  }
  // In the place of the other end, on the last connection.
  void send_to(std::size_t end, std::span<const std::uint8_t> bytes) {
    const UniqueFd& socket = connections_.back().sockets[end];
    EXPECT_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }

  // Resets all connections.
  void cut() {
    for (Connection& connection : connections_) cut(connection);
  }
  // Resets a connection as soon as this end has sent so many bytes, on all connections together.
  void cut_after(std::size_t end, std::size_t bytes) { cut_ = {end, bytes}; }
  bool has_cut() const { return !cut_; }

  const std::list<Connection>& connections() const { return connections_; }

 private:
  struct Way {
    std::size_t end;
    sockaddr_storage listener;
    UniqueFd listening;
  };
  struct Cut {
    std::size_t end;
    std::size_t bytes;
  };

  static void cut(Connection& connection) {
    for (UniqueFd& socket : connection.sockets) {
      if (socket) close_with_reset(socket);
    }
  }

  void pass_on(Connection& connection, std::size_t from) {
    std::array<std::uint8_t, 4096> bytes{};
    const UniqueFd& source = connection.sockets[from];
    const UniqueFd& target = connection.sockets[1 - from];
    while (source) {
      const Result<bool> connected = tcp_connected(target);
      if (connected && !*connected) return;
      const bool is_cut_here = cut_ && cut_->end == from;
      const std::size_t limit = is_cut_here ? std::min(cut_->bytes, bytes.size()) : bytes.size();
      const ssize_t count = connected ? ::recv(source.get(), bytes.data(), limit, MSG_DONTWAIT) : 0;
      if (count < 0 && errno == EAGAIN) return;
      if (count <= 0) return cut(connection);
      const std::span<const std::uint8_t> some = std::span(bytes).first(static_cast<std::size_t>(count));
      connection.passed_on[from].insert(connection.passed_on[from].end(), some.begin(), some.end());
      static_cast<void>(::send(target.get(), some.data(), some.size(), MSG_NOSIGNAL));
      if (!is_cut_here || (cut_->bytes -= some.size()) != 0) continue;
      cut_.reset();
      cut(connection);
    }
  }

  std::list<Way> ways_;
  std::list<Connection> connections_;
  std::optional<Cut> cut_;
};

}  // namespace verbatim::test
