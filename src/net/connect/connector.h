// One connect, from the first call to the established send comm. Never blocks: each call to advance() goes as far as it
// can.
//
//   kCreateQps --created--> kConnectTcp --connected--> kSendHello --sent--> kReceiveReply --received--> kConnectQps
//   --QPs in RTS--> kSendReady --sent--> established
//
// The peer closes a TCP connection on which no hello arrives in time. If the application calls connect too rarely, the
// hello is late. When the peer has closed the connection without a reply after a late hello, the connector goes back to
// kConnectTcp (should_retry).
//
// A TCP connect that fails because of the network or because the peer's host is busy is repeated until the deadline.
// The attempts alternate between the address of the chosen interface and any address: where the interfaces of both
// hosts are in different subnets, the first may not get through.
//
// Owned by the context, found by the token in NCCL's handle, polled by the thread that calls connect.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/unique_fd.h"
#include "net/connect/connect_settings.h"
#include "net/connect/incoming_message.h"
#include "net/transfer/send_comm.h"
#include "wire/handle.h"

namespace verbatim {

class Connector {
 public:
  // Reserves the place of this connection in the QP order of the communicator. `attempt`: a random number, the attempt
  // number of the first hello; each further hello has the next number.
  Connector(const ConnectSettings& settings, std::vector<const Port*> ports, const wire::Handle& handle,
            int traffic_class, std::uint64_t attempt);

  ~Connector();
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;

  // Returns the comm when it is established, nullptr before. An error is final and has been logged.
  Result<std::unique_ptr<SendComm>> advance();

 private:
  enum class State : std::uint8_t { kCreateQps, kConnectTcp, kSendHello, kReceiveReply, kConnectQps, kSendReady };

  // The functions of the states return whether the state is complete.
  Result<bool> take_endpoint(VerbBudget& budget);
  Result<bool> connect_tcp();
  // Prepares the next attempt and returns false, or returns the error if another attempt would fail too.
  Result<bool> repeat_connect(const Error& error);
  // Whether `error` may come from a peer that has closed the connection because the hello was late.
  bool should_retry(const Error& error) const;
  Result<bool> receive_reply();
  Result<bool> connect_qps(VerbBudget& budget);

  // Called when kReady could not be sent: stores the text of the failure notice that the peer may have sent before.
  void read_failure_notice();
  // The failure of a connection that is not established at its deadline.
  Error log_timeout() const;
  // `repeated`: the call that failed was repeated until the deadline.
  Error log_failure(const Error& error, bool repeated = false) const;

  const ConnectSettings& settings_;
  const std::vector<const Port*> ports_;
  const wire::Handle handle_;
  const int traffic_class_;
  std::uint64_t attempt_;
  const std::uint64_t deadline_ns_;
  State state_ = State::kCreateQps;
  std::shared_ptr<EndpointReservation> reservation_;  // until the QPs are taken
  UniqueFd socket_;
  bool bound_ = true;               // the attempt is made from the address of the chosen interface
  bool listened_ = false;           // an attempt has succeeded
  std::optional<Error> tcp_error_;  // of the last attempt
  std::uint64_t next_attempt_ns_ = 0;
  std::uint64_t attempt_pause_ns_;
  std::uint64_t attempt_limit_ns_;
  std::uint64_t connect_started_ns_ = 0;
  std::uint64_t hello_sent_ns_ = 0;
  OutgoingMessage outgoing_;
  IncomingMessage reply_;
  wire::Hello remote_;  // of the reply
  // The peer may make the side channel again over these. The listener is held until the monitor knows the connection.
  const std::vector<wire::Address> addresses_;
  std::unique_ptr<SendComm> comm_;
  std::string reject_reason_;  // why the peer ended the handshake, if the peer has sent it
};

}  // namespace verbatim
