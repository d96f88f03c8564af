#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <sstream>

#include "conformance.h"
#include "kill_points.h"
#include "netapi/log.h"
#include "process.h"
#include "roles.h"

namespace conformance {
namespace {

constexpr auto kTimeout = 60s;  // longer than a peer is stopped

bool ok(nccl::Result result) {
  return result == nccl::Result::kSuccess;
}

int status_of(nccl::Result result) {
  return ok(result) ? 0 : kFailedResult + static_cast<int>(result);
}

// Sends or receives one message, then closes the comm.
int exchange_one(netapi::Plugin& net, void* comm, bool sends) {
  Memory memory(kBytes);
  sends ? memory.write(0, kBytes, kSeed) : memory.expect(0, kBytes, kSeed);
  void* mhandle = nullptr;
  void* data = memory.data();
  std::size_t size = kBytes;
  int tag = kTag;
  if (!ok(net.reg_mr(comm, data, size, nccl::kPtrHost, &mhandle))) return 2;
  void* request = nullptr;
  int done = 0;
  nccl::Result result = nccl::Result::kSuccess;
  const bool settled = eventually(
      [&] {
        if (request != nullptr) {
          result = net.test(request, &done, nullptr);
        } else if (sends) {
          result = net.isend(comm, data, size, tag, mhandle, &request);
        } else {
          result = net.irecv(comm, 1, &data, &size, &tag, &mhandle, &request);
        }
        return !ok(result) || done != 0;
      },
      kTimeout);
  stop_counting();
  const bool intact = done == 0 || memory.intact();
  if (!ok(net.dereg_mr(comm, mhandle)) || !ok(sends ? net.close_send(comm) : net.close_recv(comm))) return 2;
  return settled && intact ? status_of(result) : 1;
}

bool read_handle(Handle& handle) {
  return read(STDIN_FILENO, handle.bytes, sizeof handle.bytes) == static_cast<ssize_t>(sizeof handle.bytes);
}

// The port of the only TCP socket of this process that listens, in network byte order.
in_port_t listening_port() {
  for (int fd = 0; fd < 1024; ++fd) {
    int listens = 0;
    socklen_t size = sizeof listens;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) continue;
    sockaddr_in address{};
    size = sizeof address;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0 && address.sin_family == AF_INET)
      return address.sin_port;
  }
  return 0;
}

int connect_and_signal(netapi::Plugin& net, void* context, const std::string& role) {
  std::istringstream words(role);
  std::string side;
  int signal = 0;
  std::string point;
  words >> side >> signal >> std::ws;
  std::getline(words, point);
  const bool connects = side == "connects";
  Handle handle;
  void* listen_comm = nullptr;
  if (connects) {
    static_cast<void>(!write(STDOUT_FILENO, "r", 1));  // it is started, and connects when it gets the handle
    if (!read_handle(handle)) return 2;
  } else {
    if (!ok(net.listen(context, 0, handle.bytes, &listen_comm))) return 2;
    const in_port_t port = listening_port();
    static_cast<void>(!write(STDOUT_FILENO, handle.bytes, sizeof handle.bytes));
    static_cast<void>(!write(STDOUT_FILENO, &port, sizeof port));
  }
  signal_at(signal, std::atol(point.c_str()), point);
  void* comm = nullptr;
  nccl::Result result = nccl::Result::kSuccess;
  const bool settled = eventually(
      [&] {
        result = connects ? net.connect(context, 0, handle.bytes, &comm) : net.accept(listen_comm, &comm);
        return !ok(result) || comm != nullptr;
      },
      kTimeout);
  const int status = comm != nullptr ? exchange_one(net, comm, connects) : settled ? status_of(result) : 1;
  stop_counting();
  return connects || ok(net.close_listen(listen_comm)) ? status : 2;
}

int send_to_each(netapi::Plugin& net, void* context) {
  for (Handle handle; read_handle(handle);) {
    void* comm = nullptr;
    eventually([&] { return !ok(net.connect(context, 0, handle.bytes, &comm)) || comm != nullptr; });
    if (comm == nullptr || exchange_one(net, comm, true) != 0) return 2;
  }
  return 0;
}

}  // namespace

int run_role(const std::string& role, int api) {
  netapi::set_log_callback([](const netapi::LogLine& line) {
    if (line.level == nccl::DebugLogLevel::kWarn) std::cout << line.text << std::endl;
  });
  netapi::Opened opened = netapi::open_plugin(options().plugin, api);
  void* context = nullptr;
  if (opened.plugin == nullptr || !ok(opened.plugin->init(1, {}, &context))) return 2;
  netapi::Plugin& net = *opened.plugin;
  const int status = role == "sends-to-each" ? send_to_each(net, context) : connect_and_signal(net, context, role);
  return ok(net.finalize(context)) ? status : 2;
}

}  // namespace conformance
