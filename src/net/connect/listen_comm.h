// A listen, and the connections that are being made through it.
//
//   QueuedRequest --QPs in RTS--> kSendAccept --sent--> kReceiveReady --received--> established
//
// Owned by the communicator, polled by the thread that calls accept.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/outgoing_message.h"
#include "base/result.h"
#include "base/socket.h"
#include "net/connect/connect_settings.h"
#include "net/connect/endpoint_pool.h"
#include "net/connect/incoming_message.h"
#include "net/connect/listener.h"
#include "net/transfer/recv_comm.h"
#include "wire/notice.h"

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
  // A connect request, and the place of its connection in the QP order of the communicator.
  struct QueuedRequest {
    ConnectRequest request;
    std::shared_ptr<EndpointReservation> reservation;
  };

  struct Handshake {
    enum class State : std::uint8_t { kSendAccept, kReceiveReady };
    State state = State::kSendAccept;
    std::uint64_t deadline_ns = 0;
    UniqueFd socket;
    std::string peer;  // name and address, for messages
    std::unique_ptr<RecvComm> comm;
    OutgoingMessage accept_message;
    IncomingMessage ready_message;
  };

  ListenComm(const ConnectSettings& settings, std::vector<const Port*> ports, const wire::Handle& handle)
      : settings_(settings), ports_(std::move(ports)), handle_(handle) {}

  // A place among the QPs of this communicator for a connection from `peer`.
  std::shared_ptr<EndpointReservation> reserve(const wire::Hello& peer) const;
  // Connects QPs to those of the peer; nullopt while the QPs are not created yet. A failure is sent to the peer.
  Result<std::optional<Handshake>> start_handshake(QueuedRequest& queued);
  Error reject_with_error(const ConnectRequest& request, const Error& error, Failure failure) const;
  // `failure` has the diagnosis and path that are known.
  void log_failure(const std::string& peer, const Error& error, Failure failure) const;
  // Whether the connection is established.
  static Result<bool> advance(Handshake& handshake);
  // For a peer that was sent kAccept, for which the connection may be established already: why it is not.
  static void send_notice(const Handshake& handshake, const wire::Notice& notice) noexcept;

  const ConnectSettings& settings_;
  const std::vector<const Port*> ports_;
  const wire::Handle handle_;
  std::list<QueuedRequest> queued_requests_;  // their handshake has not begun
  std::list<Handshake> handshakes_;
};

}  // namespace verbatim
