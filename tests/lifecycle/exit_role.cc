// Roles (see roles.h) whose processes exit without a call of finalize.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>

#include "conformance.h"
#include "process_resources.h"
#include "roles.h"

namespace conformance {
namespace {

// Registers a handler of exit(). From this handler on, the counting verbs library writes the name of each object that
// is modified or destroyed to standard output. The handler runs before the destructors of all libraries.
void report_from_exit_on() {
  std::atexit([] { report_verbs(STDOUT_FILENO); });
}

netapi::Plugin* g_loaded = nullptr;  // the handler of unload_at_exit() unloads it

}  // namespace

bool connect_to_itself(netapi::Plugin& net, void* context, Connection& made) {
  const auto ok = [](nccl::Result result) { return result == nccl::Result::kSuccess; };
  bool failed = !ok(net.listen(context, 0, made.handle.bytes, &made.listen_comm));
  const bool over = eventually([&] {
    if (made.send_comm == nullptr) failed = failed || !ok(net.connect(context, 0, made.handle.bytes, &made.send_comm));
    if (made.recv_comm == nullptr) failed = failed || !ok(net.accept(made.listen_comm, &made.recv_comm));
    return failed || (made.send_comm != nullptr && made.recv_comm != nullptr);
  });
  return over && !failed;
}

int exit_busy(std::unique_ptr<netapi::Plugin> plugin, void* context) {
  static netapi::Plugin& net = *plugin.release();  // stays loaded
  Connection connection;
  if (!connect_to_itself(net, context, connection)) return 1;
  static Memory memory(100'000);
  void* mhandle = nullptr;
  if (net.reg_mr(connection.recv_comm, memory.data(), memory.size(), nccl::kPtrHost, &mhandle) !=
      nccl::Result::kSuccess) {
    return 1;
  }
  static auto* const traffic = new Traffic(net);
  for (int i = 0; i < 8; ++i) traffic->recv(connection.recv_comm, {{memory.data(), memory.size(), 0, mhandle}});
  static std::atomic<int> polled = 0;
  std::thread([] {
    while (traffic->step()) ++polled;
  }).detach();
  if (!eventually([] { return polled > 100; })) return 1;
  report_from_exit_on();
  return 0;
}

int exit_idle(std::unique_ptr<netapi::Plugin> plugin, void* context) {
  static netapi::Plugin& net = *plugin.release();
  Connection connection;
  if (!connect_to_itself(net, context, connection)) return 1;
  net.close_send(connection.send_comm);
  net.close_recv(connection.recv_comm);
  net.close_listen(connection.listen_comm);
  // Both ends are closed, so the monitor destroys their QPs and MRs. This waits for it, so that it does not happen
  // during exit.
  if (!eventually([] { return verbs_alive("qp") == 0 && verbs_alive("mr") == 0; })) return 1;
  report_from_exit_on();
  return 0;
}

void unload_at_exit() {
  std::atexit([] {
    delete g_loaded;
    // Longer than VERBATIM_CLOSE_TIMEOUT_MS (500 in meson.build): if the monitor's thread still ran, it would run
    // unmapped code during this time and the process would crash.
    std::this_thread::sleep_for(std::chrono::seconds(1));
  });
}

int exit_with_pending_close(std::unique_ptr<netapi::Plugin> plugin, void* context) {
  Connection connection;
  if (!connect_to_itself(*plugin, context, connection)) return 1;
  plugin->close_send(connection.send_comm);
  g_loaded = plugin.release();
  return 0;
}

}  // namespace conformance
