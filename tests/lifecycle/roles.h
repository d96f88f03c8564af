// The roles of this program as the other process of a test. Each function returns the exit status.
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

// "exit-busy" exits with open comms and registrations, outstanding requests and a thread that polls them. "exit-idle"
// closes everything but does not call finalize. During exit, the verbs library writes destroyed objects to standard
// output.
int exit_busy(std::unique_ptr<netapi::Plugin> plugin, void* context);
int exit_idle(std::unique_ptr<netapi::Plugin> plugin, void* context);

// "exit-unload" closes one end of a connection, whose QP the monitor keeps for the other end, and unloads the plugin in
// a handler of exit() that is registered before the plugin is loaded. It crashes if the code of the monitor's thread is
// unmapped while the thread runs; otherwise its status is 0.
void unload_at_exit();
int exit_with_pending_close(std::unique_ptr<netapi::Plugin> plugin, void* context);

// "close-at-once" sends a message to itself and closes the receiver before the sender has the acknowledgement. The
// status is 10 when the send fails.
int close_at_once(netapi::Plugin& net, void* context);

// "receivers-N" writes N handles, accepts N connections, receives one message from each, closes, and writes a Report.
int receive_many(netapi::Plugin& net, void* context, std::size_t count);
// The value of --connections.
std::size_t& connections();

}  // namespace conformance
