// What this program does as the other process of a test. Each answers the exit status.
#pragma once

#include <cstddef>
#include <memory>

#include "conformance.h"
#include "netapi/plugin.h"

namespace conformance {

// A connection within one context.
struct Connection {
  Handle handle;
  void* listen_comm = nullptr;
  void* send_comm = nullptr;
  void* recv_comm = nullptr;
};
bool connect_to_itself(netapi::Plugin& net, void* context, Connection& made);

// "exit-busy" leaves comms and registrations open, requests outstanding and a thread polling them; "exit-idle" has
// closed what it had, only finalize is missing. What the verbs library is asked from exit on goes to standard output.
int exit_busy(std::unique_ptr<netapi::Plugin> plugin, void* context);
int exit_idle(std::unique_ptr<netapi::Plugin> plugin, void* context);

// "exit-unload" has closed one end of a connection, whose QP waits for the other, and unloads the plugin in a handler
// of exit() that it registered before it loaded it. It exits with 0 when nothing is pulled away under the control
// thread.
void unload_at_exit();
int exit_with_pending_close(std::unique_ptr<netapi::Plugin> plugin, void* context);

// "close-at-once" sends itself a message and closes the receiver while the sender still waits for the acknowledgement;
// 10 when the sender is told of an error.
int close_at_once(netapi::Plugin& net, void* context);

// "receivers-N" writes N handles, accepts and receives one message each, closes, and writes a Report.
int receive_many(netapi::Plugin& net, void* context, std::size_t count);
// N of --connections.
std::size_t& connections();

}  // namespace conformance
