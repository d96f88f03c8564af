// A listen, and the connections that are being made through it.
//
//   kCreateQps --created--> kConnectQps --QPs in RTS--> kSendAccept --sent--> kReceiveReady --received--> kEstablished
//
// Owned by the communicator, polled by the thread that calls accept.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "channel/incoming_message.h"
#include "channel/listener.h"
#include "net/connect/connect_settings.h"
#include "net/transfer/recv_comm.h"

namespace verbatim {

class ListenComm {
 public:
  // Registers a new secret and fills `handle` for the peer. `ordinal` counts the listens of the communicator.
  static Result<std::unique_ptr<ListenComm>> create(const ConnectSettings& settings, std::vector<const Port*> ports,
                                                    std::uint32_t ordinal, wire::Handle& handle);
  ~ListenComm();
  ListenComm(const ListenComm&) = delete;
  ListenComm& operator=(const ListenComm&) = delete;

  const ConnectSettings& settings() const { return settings_; }

  // The next established comm, nullptr while there is none. An error has been logged; the listen stays usable.
  Result<std::unique_ptr<RecvComm>> accept();

 private:
  struct Handshake {
    enum class State : std::uint8_t { kCreateQps, kConnectQps, kSendAccept, kReceiveReady, kEstablished };
    std::string peer;  // name and address, for messages: a reset socket has no address any more
    UniqueFd socket;
    wire::Hello hello;  // the peer's
    wire::Mac hello_mac;
    std::shared_ptr<EndpointReservation> reservation;  // its place in the QP order of the communicator
    std::uint64_t deadline_ns = 0;
    State state = State::kCreateQps;
    std::unique_ptr<RecvComm> comm = nullptr;
    OutgoingMessage accept_message = {};
    IncomingMessage ready_message = {};
    wire::Key session = {};

    // Why kConnectQps has not ended yet; see Endpoint::unresolved.
    std::optional<Error> unresolved() const { return comm != nullptr ? comm->endpoint().unresolved() : std::nullopt; }
  };

  ListenComm(const ConnectSettings& settings, std::vector<const Port*> ports, const wire::Handle& handle)
      : settings_(settings), ports_(std::move(ports)), handle_(handle), id_(wire::listen_id(handle.secret)) {}

  void begin(ConnectRequest request);
  // Goes as far as it can. Returns whether the connection is established.
  Result<bool> advance(Handshake& handshake, VerbBudget& budget) const;
  // The functions of the states return whether the state is complete.
  Result<bool> create_comm(Handshake& handshake, VerbBudget& budget) const;
  Result<bool> connect_qps(Handshake& handshake, VerbBudget& budget) const;
  static Result<bool> receive_ready(Handshake& handshake);
  static Error timeout_error(const Handshake& handshake);
  // Logs the failure and sends it to the peer. `repeated`: the call that failed was repeated until the deadline.
  void fail(const Handshake& handshake, const Error& error, bool repeated) const;
  void log_failure(const Handshake& handshake, const Error& error, const std::string& reason) const;
  // Sends the peer why the connection is not made.
  static void send_reason(const Handshake& handshake, ErrorKind kind, const std::string& reason);

  const ConnectSettings& settings_;
  const std::vector<const Port*> ports_;
  const wire::Handle handle_;
  const wire::ListenId id_;
  std::list<Handshake> handshakes_;
};

}  // namespace verbatim
