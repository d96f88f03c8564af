// A listen, and the connections that are being made through it.
//
//   introduced --QPs in RTS--> kAnswer --sent--> kReady --received--> done
//
// Owned by its Context, polled by the thread that calls accept.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "base/result.h"
#include "base/socket.h"
#include "net/listener.h"
#include "net/recv_comm.h"

namespace verbatim {

class ListenComm {
 public:
  // Registers a fresh secret and fills `handle` for the peer. `ordinal` counts the listens of the context.
  static Result<std::unique_ptr<ListenComm>> create(Context& context, std::vector<const Port*> ports,
                                                    std::uint32_t ordinal, wire::Handle& handle);
  ~ListenComm();
  ListenComm(const ListenComm&) = delete;
  ListenComm& operator=(const ListenComm&) = delete;

  Context& context() const { return context_; }

  // The next comm that stands, nullptr while there is none. An error has been logged; the listen goes on.
  Result<std::unique_ptr<RecvComm>> accept();

 private:
  struct Acceptance {
    enum class State : std::uint8_t { kAnswer, kReady };
    State state = State::kAnswer;
    std::uint64_t deadline_ns = 0;
    UniqueFd socket;
    std::unique_ptr<RecvComm> comm;
    OutgoingMessage answer;
    std::vector<std::uint8_t> ready;
    std::size_t ready_filled = 0;
  };

  ListenComm(Context& context, std::vector<const Port*> ports, const wire::Handle& handle)
      : context_(context), ports_(std::move(ports)), handle_(handle) {}

  // Makes QPs for a peer and connects them; tells the peer why when that fails.
  Result<Acceptance> begin(Introduction introduction);
  // Whether the connection stands.
  static Result<bool> advance(Acceptance& acceptance);

  Context& context_;
  const std::vector<const Port*> ports_;
  const wire::Handle handle_;
  std::list<Introduction> introductions_;  // not begun yet
  std::list<Acceptance> acceptances_;
};

}  // namespace verbatim
