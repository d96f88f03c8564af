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

#include "base/fd.h"
#include "base/result.h"
#include "base/socket.h"
#include "net/endpoint_pool.h"
#include "net/send_comm.h"
#include "wire/handle.h"

namespace verbatim {

class Connector {
 public:
  // Takes this connection's place among the QPs of the context: in the order of these calls. `attempt`: random.
  Connector(Context& context, std::vector<const Port*> ports, const wire::Handle& handle, int traffic_class,
            std::uint64_t attempt);

  // The comm when it stands, nullptr while it does not. An error is final and has been logged.
  Result<std::unique_ptr<SendComm>> advance();

 private:
  enum class State : std::uint8_t { kQps, kTcp, kHello, kAnswer, kReady };

  // Each answers whether its state is over.
  Result<bool> take_qps();
  Result<bool> reach();
  Status knock();
  // Whether the peer may have taken us for a stranger who stays silent: then it is worth another try.
  bool was_late(const Error& error) const;
  Result<bool> send_message();
  Result<bool> receive_answer();

  // What the peer has said to a connection that it takes to stand, where our last word does not reach it any more.
  void hear_why();
  Error report(const Error& error) const;

  Context& context_;
  const std::vector<const Port*> ports_;
  const wire::Handle handle_;
  const int traffic_class_;
  std::uint64_t attempt_;
  const std::uint64_t deadline_ns_;
  State state_ = State::kQps;
  std::shared_ptr<EndpointClaim> claim_;  // until the QPs are ours
  UniqueFd socket_;
  std::uint64_t knocked_ns_ = 0;
  std::uint64_t introduced_ns_ = 0;
  OutgoingMessage outgoing_;
  std::vector<std::uint8_t> answer_;
  std::size_t answer_filled_ = 0;
  std::unique_ptr<SendComm> comm_;
  std::string rejection_;  // the peer's reason
};

}  // namespace verbatim
