// Shared by the tests that kill or stop a peer during the handshake: the surviving end of the connection.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>

#include <functional>
#include <string>

#include "conformance.h"
#include "process.h"
#include "roles.h"

namespace conformance {

// Replaces the parts of a line that differ from run to run. TCP-END replaces the error of TCP, which depends on the
// operation in progress.
std::string normalize_line(const std::string& line);

// What a role that listens writes to its output: its handle and the port of its listening socket. Its address names it
// in warnings before it has sent its hello.
struct Listening {
  Handle handle;
  in_port_t port = 0;  // in network byte order
  std::string address() const { return "127.0.0.1:" + std::to_string(ntohs(port)); }
};
bool read_listening(Process& peer, Listening& listening);

// Whether the peer is in one of these states (WEXITED, WSTOPPED). Does not reap it.
bool has_changed_state(const Process& peer, int states);

// Sends or receives one message; the destructor closes the comm.
class Exchange {
 public:
  Exchange(netapi::Plugin& net, void* comm, bool sends);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Makes one call; true when the message is complete or has failed.
  bool step();
  // The result after step() returned true.
  nccl::Result result() const { return result_; }

 private:
  netapi::Plugin& net_;
  void* const comm_;
  const bool sends_;
  Memory memory_{kBytes};
  void* mhandle_ = nullptr;
  void* request_ = nullptr;
  nccl::Result result_ = nccl::Result::kSuccess;
  bool is_over_ = false;
};

class SurvivingPeer : public Conformance {
 protected:
  // The result of a connect or accept call; true when it failed or gave a comm.
  struct Attempt {
    nccl::Result result = nccl::Result::kSuccess;
    void* comm = nullptr;
    explicit operator bool() const { return result != nccl::Result::kSuccess || comm != nullptr; }
  };
  Attempt accept(void* listen_comm);
  Attempt connect(void* context, Handle& handle);
  nccl::Result exchange(void* comm, bool sends);
  void* listen(void* context, Handle& handle);

  // Creates a context, calls `body` with it and finalizes it; checks that nothing leaks.
  void run_role_once(const std::function<void(void* context)>& body);
};

}  // namespace conformance
