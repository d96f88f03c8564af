#include "roles.h"

#include <unistd.h>

#include <iostream>

#include "conformance.h"
#include "netapi/log.h"
#include "process.h"

namespace conformance {
namespace {

bool ok(nccl::Result result) {
  return result == nccl::Result::kSuccess;
}

void report_ready() {
  static_cast<void>(!write(STDOUT_FILENO, "r", 1));
}

// Forks a worker as applications do: it does not exec, and it does not end with its parent. Writes its process ID to
// standard output.
void fork_worker() {
  const pid_t worker = ::fork();
  if (worker == 0) {
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::close(fd);
    while (true) pause();
  }
  static_cast<void>(!write(STDOUT_FILENO, &worker, sizeof worker));
}

void* accept_one(netapi::Plugin& net, void* context) {
  Handle handle;
  void* listen_comm = nullptr;
  void* recv_comm = nullptr;
  if (!ok(net.listen(context, 0, handle.bytes, &listen_comm))) return nullptr;
  static_cast<void>(!write(STDOUT_FILENO, handle.bytes, sizeof handle.bytes));
  eventually([&] { return !ok(net.accept(listen_comm, &recv_comm)) || recv_comm != nullptr; });
  net.close_listen(listen_comm);
  return recv_comm;
}

void* connect_one(netapi::Plugin& net, void* context) {
  Handle handle;
  if (read(STDIN_FILENO, handle.bytes, sizeof handle.bytes) != static_cast<ssize_t>(sizeof handle.bytes))
    return nullptr;
  void* send_comm = nullptr;
  eventually([&] { return !ok(net.connect(context, 0, handle.bytes, &send_comm)) || send_comm != nullptr; });
  return send_comm;
}

// Tests the request until it is done or fails; returns the exit status of the role.
int wait_for(netapi::Plugin& net, void* request) {
  nccl::Result result = nccl::Result::kSuccess;
  int done = 0;
  eventually(
      [&] {
        result = net.test(request, &done, nullptr);
        return !ok(result) || done != 0;
      },
      60s);
  if (!ok(result)) return kFailedResult + static_cast<int>(result);
  return done != 0 ? 0 : 1;
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
  void* const comm = role == "sends" ? connect_one(net, context) : accept_one(net, context);
  if (comm == nullptr) return 2;
  Memory memory(kBytes);
  void* mhandle = nullptr;
  if (!ok(net.reg_mr(comm, memory.data(), memory.size(), nccl::kPtrHost, &mhandle))) return 2;
  int status = 0;
  if (role == "idles" || role == "idles-with-worker") {
    report_ready();
    if (role != "idles") fork_worker();
    while (true) pause();
  } else if (role == "receives") {
    void* data = memory.data();
    std::size_t size = kBytes;
    int tag = kTag;
    void* request = nullptr;
    if (!ok(net.irecv(comm, 1, &data, &size, &tag, &mhandle, &request)) || request == nullptr) return 2;
    report_ready();
    status = wait_for(net, request);
  } else if (role == "sends") {
    void* request = nullptr;
    eventually(
        [&] { return !ok(net.isend(comm, memory.data(), kBytes, kTag, mhandle, &request)) || request != nullptr; });
    if (request == nullptr) return 2;
    status = wait_for(net, request);
  }
  net.dereg_mr(comm, mhandle);
  role == "sends" ? net.close_send(comm) : net.close_recv(comm);
  net.finalize(context);
  return status;
}

}  // namespace conformance
