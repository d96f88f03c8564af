// Sockets of TCP over IPv4, which do not block, and the simulated host: its names and its network interfaces.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <ifaddrs.h>
#include <link.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <utility>

#include "simulation/descriptors.h"
#include "simulation/interpose.h"
#include "simulation/job_parts.h"

using namespace simulation;

namespace {

// `result` as a function of libc returns it.
template <typename Result>
Result finish(const char* call, Result result) {
  record(call, result);
  if (result >= 0) return result;
  errno = static_cast<int>(-result);
  return -1;
}

Tcp::Id id_of(int fd) {
  const Tcp::Id id = descriptors().socket(fd);
  if (id == Tcp::kNone) fail_run("a call for sockets with a descriptor that is no simulated socket");
  return id;
}

sockaddr_storage to_storage(const sockaddr* address) {
  sockaddr_storage storage{};
  std::memcpy(&storage, address, sizeof(sockaddr_in));
  return storage;
}

void copy_address(const sockaddr_storage& from, sockaddr* to, socklen_t* bytes) {
  std::memcpy(to, &from, std::min<std::size_t>(*bytes, sizeof(sockaddr_in)));
  *bytes = sizeof(sockaddr_in);
}

// The descriptor of a simulated socket.
int make_descriptor(Tcp::Id socket) {
  const int fd = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (fd >= 0) descriptors().add_socket(fd, socket);
  return fd;
}

}  // namespace

SIMULATE(int, socket, (int domain, int type, int protocol), (domain, type, protocol))
int simulated_socket(int domain, int type, int /*protocol*/) {
  if (domain != AF_INET || type != (SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC)) {
    fail_run("a socket that is not one of TCP over IPv4 without blocking and close-on-exec");
  }
  return finish("socket", make_descriptor(tcp().make()));
}

SIMULATE(int, bind, (int fd, const sockaddr* address, socklen_t bytes), (fd, address, bytes))
int simulated_bind(int fd, const sockaddr* address, socklen_t /*bytes*/) {
  step("bind");
  return finish("bind", tcp().bind(id_of(fd), to_storage(address)));
}

SIMULATE(int, listen, (int fd, int backlog), (fd, backlog))
int simulated_listen(int fd, int /*backlog*/) {
  step("listen");
  return finish("listen", tcp().listen(id_of(fd)));
}

SIMULATE(int, connect, (int fd, const sockaddr* address, socklen_t bytes), (fd, address, bytes))
int simulated_connect(int fd, const sockaddr* address, socklen_t /*bytes*/) {
  step("connect");
  const int result = tcp().connect(id_of(fd), to_storage(address));
  descriptors_changed();
  return finish("connect", result);
}

SIMULATE(int, accept4, (int fd, sockaddr* address, socklen_t* bytes, int flags), (fd, address, bytes, flags))
int simulated_accept4(int fd, sockaddr* address, socklen_t* bytes, int /*flags*/) {
  step("accept4");
  const Tcp::Id accepted = tcp().accept(id_of(fd));
  if (accepted < 0) return finish("accept4", accepted);
  if (address != nullptr) copy_address(tcp().remote(accepted), address, bytes);
  descriptors_changed();
  return finish("accept4", make_descriptor(accepted));
}

SIMULATE(ssize_t, send, (int fd, const void* data, std::size_t bytes, int flags), (fd, data, bytes, flags))
ssize_t simulated_send(int fd, const void* data, std::size_t bytes, int /*flags*/) {
  step("send");
  const std::int64_t result = tcp().send(id_of(fd), data, bytes);
  if (result > 0) descriptors_changed();
  return finish("send", result);
}

SIMULATE(ssize_t, recv, (int fd, void* data, std::size_t bytes, int flags), (fd, data, bytes, flags))
ssize_t simulated_recv(int fd, void* data, std::size_t bytes, int flags) {
  step("recv");
  const std::int64_t result = tcp().receive(id_of(fd), data, bytes, (flags & MSG_PEEK) != 0);
  if (result > 0) descriptors_changed();
  return finish("recv", result);
}

SIMULATE(int, shutdown, (int fd, int how), (fd, how))
int simulated_shutdown(int fd, int how) {
  step("shutdown");
  const int result = tcp().shut_down(id_of(fd), how);
  descriptors_changed();
  return finish("shutdown", result);
}

SIMULATE(int, getsockname, (int fd, sockaddr* address, socklen_t* bytes), (fd, address, bytes))
int simulated_getsockname(int fd, sockaddr* address, socklen_t* bytes) {
  copy_address(tcp().local(id_of(fd)), address, bytes);
  return finish("getsockname", 0);
}

SIMULATE(int, getpeername, (int fd, sockaddr* address, socklen_t* bytes), (fd, address, bytes))
int simulated_getpeername(int fd, sockaddr* address, socklen_t* bytes) {
  if (tcp().remote(id_of(fd)).ss_family == 0) return finish("getpeername", -ENOTCONN);
  copy_address(tcp().remote(id_of(fd)), address, bytes);
  return finish("getpeername", 0);
}

SIMULATE(int, getsockopt, (int fd, int level, int name, void* value, socklen_t* bytes), (fd, level, name, value, bytes))
int simulated_getsockopt(int fd, int level, int name, void* value, socklen_t* bytes) {
  step("getsockopt");
  const Tcp::Id id = id_of(fd);
  std::memset(value, 0, *bytes);
  if (level == SOL_SOCKET && name == SO_ERROR) {
    *static_cast<int*>(value) = tcp().take_error(id);
    return finish("getsockopt", 0);
  }
  if (level == IPPROTO_TCP && name == TCP_INFO) {
    static_cast<tcp_info*>(value)->tcpi_state = tcp().is_established(id) ? TCP_ESTABLISHED : TCP_CLOSE;
    return finish("getsockopt", 0);
  }
  fail_run("getsockopt with an option that the simulation does not know");
}

SIMULATE(int, setsockopt, (int fd, int level, int name, const void* value, socklen_t bytes),
         (fd, level, name, value, bytes))
int simulated_setsockopt(int fd, int level, int name, const void* value, socklen_t /*bytes*/) {
  const Tcp::Id id = id_of(fd);
  // What the others change cannot be seen here.
  if (level == SOL_SOCKET && name == SO_LINGER) {
    const linger& chosen = *static_cast<const linger*>(value);
    tcp().reset_on_close(id, chosen.l_onoff != 0 && chosen.l_linger == 0);
  } else if (level == IPPROTO_TCP && name == TCP_DEFER_ACCEPT) {
    tcp().defer_accept(id, *static_cast<const int*>(value));
  } else if (level == IPPROTO_TCP && name == TCP_USER_TIMEOUT) {
    tcp().set_user_timeout(id, static_cast<Time>(*static_cast<const int*>(value)) * kMillisecond);
  } else if (level == SOL_SOCKET && name == SO_RCVLOWAT) {
    tcp().set_low_water(id, static_cast<std::size_t>(*static_cast<const int*>(value)));
  }
  return finish("setsockopt", 0);
}

SIMULATE(int, ioctl, (int fd, unsigned long request, void* argument), (fd, request, argument))
int simulated_ioctl(int fd, unsigned long request, void* argument) {
  if (!descriptors().is_known(fd)) return next_ioctl(fd, request, argument);
  if (request != SIOCOUTQ) fail_run("ioctl with a request that the simulation does not know");
  step("ioctl");
  *static_cast<int*>(argument) = tcp().unacknowledged(id_of(fd));
  return finish("ioctl", 0);
}

// One socket takes the place of another one.
SIMULATE(int, dup3, (int from, int to, int flags), (from, to, flags))
int simulated_dup3(int from, int to, int flags) {
  step("dup3");
  const Tcp::Id id = id_of(from);
  if (descriptors().is_known(to)) descriptors().remove(to);
  const int result = next_dup3(from, to, flags);
  if (result >= 0) descriptors().add_socket(to, id);
  descriptors_changed();
  return finish("dup3", result);
}

SIMULATE(int, uname, (utsname * host), (host))
int simulated_uname(utsname* host) {
  *host = {};
  return ::gethostname(host->nodename, sizeof host->nodename);
}

// softverbs' first QP numbers follow from the PID namespace, too.
SIMULATE(int, stat64, (const char* path, struct stat64* found), (path, found))
int simulated_stat64(const char* path, struct stat64* found) {
  const int result = next_stat64(path, found);
  if (result == 0 && std::string_view(path) == "/proc/self/ns/pid") found->st_ino = 1;
  return result;
}

SIMULATE(int, gethostname, (char* name, std::size_t bytes), (name, bytes))
int simulated_gethostname(char* name, std::size_t bytes) {
  static_cast<void>(std::snprintf(name, bytes, "simulated"));
  return 0;
}

// The plugin writes the id of its process into messages, which would be longer or shorter. softverbs needs the real
// one.
namespace {

const auto next_getpid = verbatim::test::next_function<pid_t (*)()>("getpid");

bool is_in_plugin(void* address) {
  dl_find_object found{};
  return ::_dl_find_object(address, &found) == 0 &&
         std::string_view(found.dlfo_link_map->l_name).find("libnccl-net-verbatim") != std::string_view::npos;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) pid_t getpid() noexcept {
  if (!is_simulated() || !is_in_plugin(__builtin_return_address(0))) return next_getpid();
  return id_of_process(own_process());
}

SIMULATE(int, getifaddrs, (ifaddrs * *list), (list))
int simulated_getifaddrs(ifaddrs** list) {
  struct Interface {
    char name[24];
    sockaddr_in address;
    ifaddrs entry;
  };
  static Interface all[kInterfaces];
  static sockaddr_in netmask{AF_INET, 0, {htonl(0xffffff00)}, {}};
  ifaddrs* next = nullptr;
  for (std::size_t i = tcp().interfaces(); i-- > 0;) {
    Interface& each = all[i];
    std::snprintf(each.name, sizeof each.name, "sim%zu", i);
    each.address = {AF_INET, 0, address_of(i), {}};
    each.entry = {};
    each.entry.ifa_next = std::exchange(next, &each.entry);
    each.entry.ifa_name = each.name;
    each.entry.ifa_flags = IFF_UP | IFF_RUNNING;
    each.entry.ifa_addr = reinterpret_cast<sockaddr*>(&each.address);
    each.entry.ifa_netmask = reinterpret_cast<sockaddr*>(&netmask);
  }
  *list = next;
  return 0;
}

SIMULATE(void, freeifaddrs, (ifaddrs * list), (list))
void simulated_freeifaddrs(ifaddrs* /*list*/) {}
