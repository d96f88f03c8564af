// What the tests share in which a peer ends in mid-handshake: the end that goes on.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "conformance.h"
#include "process.h"
#include "roles.h"

namespace conformance {

// A line with words for what differs from run to run. How TCP says that the peer is gone depends on what was under way.
std::string fixed(const std::string& line);

// What it says of a handshake, so fixed.
inline const std::string kAcceptFailed =
    "accepting a connection from HOST (pid #, 127.0.0.1:#) on verbatim_softverbs0 of HOST failed: ";
inline const std::string kConnectFailed = "connecting verbatim_softverbs0 of HOST to the peer at 127.0.0.1:# failed: ";
inline const std::string kWentFirst =
    "TCP-END: the peer closed the connection first. Next: look at WHO first: its log says why";
inline const std::string kRefused =
    "connect: Connection refused: its process has ended or does not listen any more, or a firewall blocks the "
    "connection. Next: look at WHO first: its log says why";
inline const std::string kUnanswered =
    "TCP-END: the peer closed the connection first: its process has ended, or it does not listen for this connection "
    "any more. Next: look at WHO first: its log says why";

// Which a peer that listens is called by before it has introduced itself.
std::string address_of(const Handle& handle);

// WEXITED, WSTOPPED: without taking notice of it.
bool has_changed_state(const Process& peer, int states);

// One message over a comm, and the end of the comm.
class Exchange {
 public:
  Exchange(netapi::Plugin& net, void* comm, bool sends);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Whether it is over.
  bool step();
  // Of what is over: success with every byte right, or the error.
  nccl::Result result() const { return result_; }

 private:
  netapi::Plugin& net_;
  void* const comm_;
  const bool sends_;
  Memory memory_{kBytes};
  void* mhandle_ = nullptr;
  void* request_ = nullptr;
  nccl::Result result_ = nccl::Result::kSuccess;
  bool over_ = false;
};

class SurvivingPeer : public Conformance {
 protected:
  // This end of a connection, or why there is none.
  struct Made {
    nccl::Result result = nccl::Result::kSuccess;
    void* comm = nullptr;
    explicit operator bool() const { return result != nccl::Result::kSuccess || comm != nullptr; }
  };
  Made accept(void* listen_comm);
  Made connect(void* own, Handle& handle);
  nccl::Result exchange(void* comm, bool sends);
  void* listen(void* own, Handle& handle);

  // One life, in which `live` uses its context; nothing may be left of it.
  void run_role_once(const std::function<void(void* own)>& live);
};

}  // namespace conformance
