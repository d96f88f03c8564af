#include "base/socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

namespace verbatim {
namespace {

// When a large job starts, thousands of peers connect at once. The kernel reduces this value to net.core.somaxconn.
constexpr int kListenBacklog = 16384;

constexpr const char* kPeerClosed = "recv: the peer closed the connection";

bool would_block(int error) {
  return error == EAGAIN || error == EWOULDBLOCK;
}

Error remote_error(const char* operation, int sys_errno) {
  return {ErrorKind::kRemote, sys_errno, operation};
}

// bind and connect accept the size of sockaddr_storage for each family.
const sockaddr* as_sockaddr(const sockaddr_storage& address) {
  return reinterpret_cast<const sockaddr*>(&address);
}

Result<UniqueFd> tcp_socket(sa_family_t family) {
  UniqueFd socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return system_error("socket", errno);
  return socket;
}

void set_no_delay(const UniqueFd& socket) {
  const int on = 1;
  // Without TCP_NODELAY only the latency is worse, so a failure is ignored.
  static_cast<void>(::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
}

// A link-local address from a peer has the scope ID of the peer's host. On this host the same link can have another ID.
void copy_scope_id(const sockaddr_storage& local, sockaddr_storage& remote) {
  if (remote.ss_family != AF_INET6) return;
  auto& v6 = reinterpret_cast<sockaddr_in6&>(remote);
  if (IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr))
    v6.sin6_scope_id = reinterpret_cast<const sockaddr_in6&>(local).sin6_scope_id;
}

template <typename Query>
Result<sockaddr_storage> query_address(Query query, const UniqueFd& socket, const char* operation) {
  sockaddr_storage address{};
  socklen_t bytes = sizeof address;
  if (query(socket.get(), reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return system_error(operation, errno);
  return address;
}

}  // namespace

// The port is at the same place in the addresses of both families.
static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));

std::string to_string(const sockaddr_storage& address) {
  const std::string host = host_to_string(address);
  const in_port_t port = ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  return (address.ss_family == AF_INET6 ? "[" + host + "]:" : host + ":") + std::to_string(port);
}

std::string host_to_string(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "?";
  if (address.ss_family != AF_INET6) {
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(address).sin_addr, text, sizeof text);
    return text;
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  ::inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof text);
  return v6.sin6_scope_id == 0 ? text : text + ("%" + std::to_string(v6.sin6_scope_id));
}

bool is_link_local(const sockaddr_storage& address) {
  return address.ss_family == AF_INET6 &&
         IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

void set_port(sockaddr_storage& address, in_port_t port) {
  reinterpret_cast<sockaddr_in&>(address).sin_port = port;
}

Result<UniqueFd> tcp_listen(const sockaddr_storage& address) {
  Result<UniqueFd> socket = tcp_socket(address.ss_family);
  if (!socket) return socket;
  const int on = 1;  // allows bind() while connections of an earlier listener on this port still exist
  if (::setsockopt(socket->get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0) {
    return system_error("setsockopt", errno);
  }
  if (::bind(socket->get(), as_sockaddr(address), sizeof address) != 0) return system_error("bind", errno);
  if (::listen(socket->get(), kListenBacklog) != 0) return system_error("listen", errno);
  return socket;
}

void set_defer_accept(const UniqueFd& listener, int seconds) {
  static_cast<void>(::setsockopt(listener.get(), IPPROTO_TCP, TCP_DEFER_ACCEPT, &seconds, sizeof seconds));
}

Result<sockaddr_storage> local_address(const UniqueFd& socket) {
  return query_address(::getsockname, socket, "getsockname");
}

Result<sockaddr_storage> remote_address(const UniqueFd& socket) {
  return query_address(::getpeername, socket, "getpeername");
}

Result<std::optional<UniqueFd>> tcp_accept(const UniqueFd& listener) {
  UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket) {
    set_no_delay(socket);
    return std::optional<UniqueFd>(std::move(socket));
  }
  switch (errno) {
    case EAGAIN:
    case EINTR:
    // accept() reports errors of a queued connection that has failed already (man 2 accept). The next can be usable.
    case ECONNABORTED:
    case ENETDOWN:
    case EPROTO:
    case ENOPROTOOPT:
    case EHOSTDOWN:
    case ENONET:
    case EHOSTUNREACH:
    case EOPNOTSUPP:
    case ENETUNREACH:
    case EPERM:  // a firewall
      return std::optional<UniqueFd>();
    default:
      break;
  }
  return system_error("accept", errno);
}

Result<UniqueFd> tcp_connect(const sockaddr_storage& remote, const sockaddr_storage& local) {
  Result<UniqueFd> socket = tcp_socket(remote.ss_family);
  if (!socket) return socket;
  set_no_delay(*socket);
  sockaddr_storage to = remote;
  if (local.ss_family == remote.ss_family) {
    sockaddr_storage from = local;
    copy_scope_id(from, to);
    set_port(from, 0);
    // With this option connect() chooses the port. Otherwise bind() would choose it, without knowing the remote
    // address, and would fail when connections in TIME_WAIT use all ports of this address. Kernels without the option
    // do that.
    const int on = 1;
    ::setsockopt(socket->get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
    if (::bind(socket->get(), as_sockaddr(from), sizeof from) != 0) return system_error("bind", errno);
  }
  if (::connect(socket->get(), as_sockaddr(to), sizeof to) != 0 && errno != EINPROGRESS && errno != EINTR) {
    return remote_error("connect", errno);
  }
  return socket;
}

bool is_passing(const Error& error) {
  switch (error.sys_errno) {
    case ECONNREFUSED:
    case ECONNRESET:
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case EHOSTDOWN:
    case ENETUNREACH:
    case ENETDOWN:
    case EADDRNOTAVAIL:  // the address was removed, or has no free port
    case EAGAIN:
      return true;
    default:
      return false;
  }
}

void set_keepalive(const UniqueFd& socket, unsigned seconds) {
  // The first probe after half of the time, and three more in the rest.
  constexpr int kProbes = 3;
  constexpr int kMaxIdle = 32'767;  // of Linux
  const int total = static_cast<int>(seconds);
  const int on = 1;
  const int idle = std::clamp(total / 2, 1, kMaxIdle);
  const int interval = std::max((total - idle) / kProbes, 1);
  const int timeout_ms = total * 1000;
  static_cast<void>(::setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on));
  static_cast<void>(::setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle));
  static_cast<void>(::setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval));
  static_cast<void>(::setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPCNT, &kProbes, sizeof kProbes));
  // Of data that is not acknowledged, and of probes, in place of TCP_KEEPCNT (tcp(7)).
  static_cast<void>(::setsockopt(socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms));
}

void reset_on_close(const UniqueFd& socket, bool resets) {
  const linger reset{.l_onoff = resets ? 1 : 0, .l_linger = 0};
  static_cast<void>(::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset));
}

void close_with_reset(UniqueFd& socket) {
  reset_on_close(socket);
  socket.reset();
}

// Not by libc's function: ThreadSanitizer would take the descriptor for a new one.
void reset_connection(const UniqueFd& socket) {
  const sockaddr none{.sa_family = AF_UNSPEC, .sa_data = {}};
  ::syscall(SYS_connect, socket.get(), &none, sizeof none);
}

bool is_established(const UniqueFd& socket) {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  return ::getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 && info.tcpi_state == TCP_ESTABLISHED;
}

Result<bool> tcp_connected(const UniqueFd& socket) {
  pollfd writable{socket.get(), POLLOUT, 0};
  const int ready = ::poll(&writable, 1, 0);
  if (ready < 0 && errno != EINTR) return system_error("poll", errno);
  if (ready <= 0) return false;
  int error = 0;
  socklen_t bytes = sizeof error;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) != 0) return system_error("getsockopt", errno);
  if (error != 0) return remote_error("connect", error);
  return true;
}

Result<bool> send_from(const UniqueFd& socket, std::span<const std::uint8_t> bytes, std::size_t& sent) {
  while (sent < bytes.size()) {
    const ssize_t count = ::send(socket.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      sent += static_cast<std::size_t>(count);
    } else if (would_block(errno)) {
      return false;
    } else if (errno != EINTR) {
      return remote_error("send", errno);
    }
  }
  return true;
}

Result<bool> receive_into(const UniqueFd& socket, std::span<std::uint8_t> buffer, std::size_t& filled) {
  while (filled < buffer.size()) {
    const ssize_t count = ::recv(socket.get(), buffer.data() + filled, buffer.size() - filled, 0);
    if (count > 0) {
      filled += static_cast<std::size_t>(count);
    } else if (count == 0) {
      return remote_error(kPeerClosed, 0);
    } else if (would_block(errno)) {
      return false;
    } else if (errno != EINTR) {
      return remote_error("recv", errno);
    }
  }
  return true;
}

Status check_open(const UniqueFd& socket) {
  std::uint8_t byte = 0;
  const ssize_t count = ::recv(socket.get(), &byte, 1, MSG_PEEK);
  if (count == 0) return remote_error(kPeerClosed, 0);
  if (count < 0 && !would_block(errno) && errno != EINTR) return remote_error("recv", errno);
  return {};
}

}  // namespace verbatim
