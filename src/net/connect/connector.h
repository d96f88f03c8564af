// One connect, from the first call to the established send comm. Never blocks: each call to advance() goes as far as it
// can.
//
//   kCreateQps --created--> kDial --the peer has accepted--> kConnectQps --QPs in RTS--> kSendReady --sent-->
//   established
//
// Owned by the context, found by the token in NCCL's handle, polled by the thread that calls connect.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "channel/dial.h"
#include "net/connect/connect_settings.h"
#include "net/transfer/send_comm.h"
#include "wire/authentication.h"
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
  enum class State : std::uint8_t { kCreateQps, kDial, kConnectQps, kSendReady };

  // The functions of the states return whether the state is complete.
  Result<bool> take_endpoint(VerbBudget& budget);
  Result<bool> dial();
  Result<bool> connect_qps(VerbBudget& budget);

  wire::Hello make_hello();
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
  const wire::Key key_;  // of the hellos
  const std::uint64_t deadline_ns_;
  State state_ = State::kCreateQps;
  std::shared_ptr<EndpointReservation> reservation_;  // until the QPs are taken
  Dial dial_;
  OutgoingMessage ready_;
  wire::Hello remote_;  // of the reply
  wire::Mac hello_mac_{};
  std::optional<wire::Key> session_;
  // The peer may make the side channel again over these. The listener is held until the monitor knows the connection.
  const std::vector<wire::Address> addresses_;
  std::unique_ptr<SendComm> comm_;
};

}  // namespace verbatim
