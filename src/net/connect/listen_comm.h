// A listen, and the connections that are being made through it.
//
//   Arrival --QPs in RTS--> kAnswer --sent--> kReady --received--> done
//
// Owned by its Context, polled by the thread that calls accept.
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
#include "net/connect/listener.h"
#include "net/transfer/recv_comm.h"
#include "wire/notice.h"

namespace verbatim {

class ListenComm {
 public:
  // Registers a fresh secret and fills `handle` for the peer. `ordinal` counts the listens of the context.
  static Result<std::unique_ptr<ListenComm>> create(const ConnectSettings& settings, std::vector<const Port*> ports,
                                                    std::uint32_t ordinal, wire::Handle& handle);
  ~ListenComm();
  ListenComm(const ListenComm&) = delete;
  ListenComm& operator=(const ListenComm&) = delete;

  const ConnectSettings& settings() const { return settings_; }

  // The next comm that stands, nullptr while there is none. An error has been logged; the listen goes on.
  Result<std::unique_ptr<RecvComm>> accept();

 private:
  // A peer that has introduced itself, and its place among the QPs of the context.
  struct QueuedRequest {
    ConnectRequest request;
    std::shared_ptr<EndpointReservation> reservation;
  };

  struct Handshake {
    enum class State : std::uint8_t { kSendAccept, kReceiveReady };
    State state = State::kSendAccept;
    std::uint64_t deadline_ns = 0;
    UniqueFd socket;
    std::string peer;  // and where it is, for messages
    std::unique_ptr<RecvComm> comm;
    OutgoingMessage accept_message;
    std::vector<std::uint8_t> ready_message;
    std::size_t ready_received = 0;
  };

  ListenComm(const ConnectSettings& settings, std::vector<const Port*> ports, const wire::Handle& handle)
      : settings_(settings), ports_(std::move(ports)), handle_(handle) {}

  // A place among the QPs of this communicator for a connection from `peer`.
  std::shared_ptr<EndpointReservation> reserve(const wire::Hello& peer) const;
  // Connects QPs to the peer's and answers it; nothing while they are being made. Tells the peer why when that fails.
  Result<std::optional<Handshake>> start_handshake(QueuedRequest& queued);
  Error reject_with_error(const ConnectRequest& request, const Error& error, Failure failure) const;
  // `failure` has the diagnosis and path that are known.
  void log_failure(const std::string& peer, const Error& error, Failure failure) const;
  // Whether the connection stands.
  static Result<bool> advance(Handshake& handshake);
  // For a peer that has its answer, and so a connection that stands on its side: why there is none.
  static void send_notice(const Handshake& handshake, const wire::Notice& notice) noexcept;

  const ConnectSettings& settings_;
  const std::vector<const Port*> ports_;
  const wire::Handle handle_;
  std::list<QueuedRequest> queued_requests_;  // not begun yet
  std::list<Handshake> handshakes_;
};

}  // namespace verbatim
