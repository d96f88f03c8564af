#include "ranks/meeting_point.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/socket.h"
#include "ranks/failure.h"

namespace verbatim::ranks {
namespace {

constexpr std::string_view kLocal = "unix:";
constexpr int kConnectPauseMs = 100;
constexpr int kAttemptMs = 1'000;  // of one address, before the next is tried
constexpr int kLocalBacklog = 4096;

struct HostAndPort {
  std::string host;
  std::string port;
};

HostAndPort split(const std::string& where) {
  const std::size_t colon = where.rfind(':');
  const std::string port = colon == std::string::npos ? "" : where.substr(colon + 1);
  std::string host = where.substr(0, std::min(colon, where.size()));
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  if (host.empty() || port.empty() || port.size() > 5 || port.find_first_not_of("0123456789") != std::string::npos ||
      std::stoi(port) < 1 || std::stoi(port) > 65535) {
    throw Failure("--root is not HOST:PORT: " + where, ExitStatus::kUsage);
  }
  return {host, port};
}

// The addresses of HOST:PORT. Empty with a reason in `why` when the name server does not answer.
std::vector<sockaddr_storage> resolve(const std::string& where, std::string& why) {
  const auto [host, port] = split(where);
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), port.c_str(), &wanted, &found);
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  std::vector<sockaddr_storage> addresses;
  if (error == EAI_AGAIN) {
    why = gai_strerror(error);
  } else if (error != 0) {
    throw Failure("--root " + where + ": " + gai_strerror(error), ExitStatus::kUsage);
  }
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    std::memcpy(&addresses.emplace_back(), one->ai_addr, one->ai_addrlen);
  }
  return addresses;
}

struct LocalAddress {
  sockaddr_un address{};
  socklen_t bytes = 0;
};

LocalAddress local_name(const std::string& where) {
  LocalAddress local;
  local.address.sun_family = AF_UNIX;
  const std::string name = where.substr(kLocal.size());
  if (name.empty() || name.size() >= sizeof local.address.sun_path) {
    throw Failure("not a name of a local socket: " + where, ExitStatus::kUsage);
  }
  std::memcpy(local.address.sun_path + 1, name.data(), name.size());  // abstract: the first byte is 0
  local.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return local;
}

UniqueFd local_socket() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) throw Failure(std::string("socket: ") + std::strerror(errno));
  return socket;
}

UniqueFd listen_locally(const std::string& where) {
  const LocalAddress local = local_name(where);
  UniqueFd socket = local_socket();
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&local.address), local.bytes) != 0 ||
      ::listen(socket.get(), kLocalBacklog) != 0) {
    const bool in_use = errno == EADDRINUSE;
    throw Failure("listening for the other ranks: " + std::string(std::strerror(errno)) +
                  (in_use ? ": another job of the same launcher, or a process of another user, has this place on this "
                            "host. Next: wait for its end, or give each job a --root HOST:PORT of its own"
                          : ""));
  }
  return socket;
}

std::string next_after(int error) {
  switch (error) {
    case EADDRNOTAVAIL:
      return ". Next: --root must be an address of the host on which rank 0 runs";
    case EADDRINUSE:
      return ". Next: another process listens there; give another port to all ranks";
    case EACCES:
      return ". Next: give a port from 1024 on to all ranks";
    default:
      return "";
  }
}

// Debian gives a host's own name the address 127.0.1.1: rank 0 then listens where no other host can connect.
void warn_of_loopback(const std::string& where, const sockaddr_storage& address) {
  const std::string host = split(where).host;
  if (address.ss_family != AF_INET || host == "localhost" || host == host_to_string(address)) return;
  if (ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24 != IN_LOOPBACKNET) return;
  print_error("on this host " + host + " is the loopback address " + host_to_string(address) +
              ", where ranks on other hosts cannot connect. Next: give --root with an IP address");
}

// Returns an invalid descriptor, with the reason in `why`, when nothing accepts the connection.
UniqueFd connect_once(const sockaddr_storage& address, std::string& why) {
  auto socket = tcp_connect(address, {});
  if (!socket) {
    why = std::strerror(socket.error().sys_errno);
    return {};
  }
  pollfd writable{socket->get(), POLLOUT, 0};
  ::poll(&writable, 1, kAttemptMs);
  const auto connected = tcp_connected(*socket);
  if (connected && *connected) return std::move(*socket);
  why = connected ? "no answer" : std::strerror(connected.error().sys_errno);
  return {};
}

UniqueFd connect_locally(const std::string& where, std::string& why) {
  const LocalAddress local = local_name(where);
  UniqueFd socket = local_socket();
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&local.address), local.bytes) != 0) {
    why = std::strerror(errno);
    return {};
  }
  // Every user can take a name in the abstract namespace.
  if (is_of_this_user(socket)) return socket;
  why = "the process that listens there is of another user, or in another user namespace";
  return {};
}

}  // namespace

void check_meeting_point(const std::string& where) {
  if (is_local(where)) {
    local_name(where);
  } else {
    split(where);
  }
}

bool is_local(const std::string& where) {
  return where.starts_with(kLocal);
}

bool is_local(const UniqueFd& socket) {
  int domain = 0;
  socklen_t bytes = sizeof domain;
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_DOMAIN, &domain, &bytes) == 0 && domain == AF_UNIX;
}

bool is_of_this_user(const UniqueFd& local_socket) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return ::getsockopt(local_socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == ::geteuid();
}

UniqueFd listen_at(const std::string& where) {
  if (is_local(where)) return listen_locally(where);
  std::string why;
  int error = EADDRNOTAVAIL;
  for (const sockaddr_storage& address : resolve(where, why)) {
    auto listener = tcp_listen(address);
    if (listener) {
      warn_of_loopback(where, address);
      return std::move(*listener);
    }
    error = listener.error().sys_errno;
    why = std::strerror(error);
  }
  throw Failure("listening for the other ranks at " + where + ": " + why + next_after(error));
}

UniqueFd connect_to(const std::string& where, std::uint64_t deadline_ns) {
  std::string why;
  std::vector<sockaddr_storage> addresses;
  do {
    if (is_local(where)) {
      if (UniqueFd socket = connect_locally(where, why)) return socket;
    } else if (addresses.empty()) {
      addresses = resolve(where, why);
    }
    for (const sockaddr_storage& address : addresses) {
      if (UniqueFd socket = connect_once(address, why)) return socket;
    }
    ::poll(nullptr, 0, kConnectPauseMs);
  } while (monotonic_ns() < deadline_ns);
  if (is_local(where)) {
    throw Failure(
        "rank 0 does not run on this host, or another launcher has started it (" + why +
            "). Next: for ranks on several hosts give all of them --root HOST:PORT, an address of the host of "
            "rank 0 and a free port there",
        ExitStatus::kTimeout);
  }
  throw Failure("no coordinator accepts connections at " + where + " (" + why +
                    "). Next: check --root, that rank 0 is running, and that no firewall is between",
                ExitStatus::kTimeout);
}

std::string peer_of(const UniqueFd& socket) {
  const auto address = remote_address(socket);
  return address && address->ss_family != AF_UNIX ? to_string(*address) : "this host";
}

}  // namespace verbatim::ranks
