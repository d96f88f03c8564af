// One connect, from the first call to the finished send comm. Never blocks: each call to advance() goes as far as it
// can.
//
//   kQps --made--> kTcp --connected--> kHello --sent--> kAnswer --received--> kReady --sent--> done
//
// The peer, which hears many, may count on a hello right after the connection. Where the application was away between
// the two it may have been sent away as a stranger, and knocks again.
//
// Owned by its Context, found again by the token in NCCL's handle, polled by the thread that calls connect.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/outgoing_message.h"
#include "base/result.h"
#include "base/socket.h"
#include "base/unique_fd.h"
#include "net/connect/connect_settings.h"
#include "net/connect/endpoint_pool.h"
#include "net/transfer/send_comm.h"
#include "wire/handle.h"

namespace verbatim {

class Connector {
 public:
  // Takes this connection's place among the QPs of the context: in the order of these calls. `attempt`: random.
  Connector(const ConnectSettings& settings, std::vector<const Port*> ports, const wire::Handle& handle,
            int traffic_class, std::uint64_t attempt);

  // The comm when it stands, nullptr while it does not. An error is final and has been logged.
  Result<std::unique_ptr<SendComm>> advance();

 private:
  enum class State : std::uint8_t { kCreateQps, kConnectTcp, kSendHello, kReceiveReply, kSendReady };

  // Each answers whether its state is over.
  Result<bool> take_endpoint();
  Result<bool> finish_tcp_connect();
  Status start_tcp_connect();
  // Whether the peer may have taken us for a stranger who stays silent: then it is worth another try.
  bool should_retry(const Error& error) const;
  Result<bool> send_message();
  Result<bool> receive_reply();

  // What the peer has said to a connection that it takes to stand, where our last word does not reach it any more.
  void read_failure_notice();
  Error log_failure(const Error& error) const;

  const ConnectSettings& settings_;
  const std::vector<const Port*> ports_;
  const wire::Handle handle_;
  const int traffic_class_;
  std::uint64_t attempt_;
  const std::uint64_t deadline_ns_;
  State state_ = State::kCreateQps;
  std::shared_ptr<EndpointReservation> reservation_;  // until the QPs are ours
  UniqueFd socket_;
  std::uint64_t connect_started_ns_ = 0;
  std::uint64_t hello_sent_ns_ = 0;
  OutgoingMessage outgoing_;
  std::vector<std::uint8_t> reply_;
  std::size_t reply_received_ = 0;
  std::unique_ptr<SendComm> comm_;
  std::string reject_reason_;  // the peer's reason
};

}  // namespace verbatim
