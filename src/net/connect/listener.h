// The one TCP socket on which this process is reached, and what knocks there. Every listen of every communicator is a
// secret; a connection that presents it, for the first time, is handed to its listen, anything else is dropped without
// a sound on the wire. No thread of its own: whoever polls accept also serves the others.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "wire/handshake.h"

namespace verbatim {

// A peer that has shown the right secret.
struct ConnectRequest {
  UniqueFd socket;
  wire::Hello hello;
};

// Tells the peer that nobody will accept it.
void reject(const ConnectRequest& request);

class Listener {
 public:
  // Listens at `address`, whose port is 0, while there are listens, and at one port as long as it can be had.
  explicit Listener(const sockaddr_storage& address) : address_(address) {}
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Where peers are to knock.
  Result<sockaddr_storage> add(const wire::Secret& secret) VERBATIM_EXCLUDES(mutex_);
  // With the last one everybody who waits is sent away, and whoever comes later is refused.
  void remove(const wire::Secret& secret) noexcept VERBATIM_EXCLUDES(mutex_);

  // Serves the socket and what has connected to it; answers the peers that have asked for `secret` since the last call.
  Result<std::vector<ConnectRequest>> poll(const wire::Secret& secret) VERBATIM_EXCLUDES(mutex_);

 private:
  // Connected, and not known yet.
  struct PendingConnection {
    UniqueFd socket;
    std::uint64_t accepted_ns = 0;
    std::vector<std::uint8_t> message;  // the header, then header and body
    std::size_t filled = 0;
  };
  struct Listen {
    std::vector<ConnectRequest> requests;
    std::set<std::uint64_t> attempts;  // of all hellos so far
  };
  enum class HelloState : std::uint8_t { kIncomplete, kClose, kComplete };

  Status open() VERBATIM_REQUIRES(mutex_);
  void read_pending() VERBATIM_REQUIRES(mutex_);
  Status accept_pending() VERBATIM_REQUIRES(mutex_);
  HelloState read_hello(PendingConnection& pending) VERBATIM_REQUIRES(mutex_);
  Status report_resource_shortage(const Error& error) VERBATIM_REQUIRES(mutex_);
  void reject_version(const PendingConnection& pending) VERBATIM_REQUIRES(mutex_);

  Mutex mutex_;
  sockaddr_storage address_ VERBATIM_GUARDED_BY(mutex_);
  UniqueFd socket_ VERBATIM_GUARDED_BY(mutex_);
  bool shortage_reported_ VERBATIM_GUARDED_BY(mutex_) = false;  // of descriptors or memory, and has said so
  bool version_mismatch_reported_ VERBATIM_GUARDED_BY(mutex_) = false;
  std::list<PendingConnection> pending_ VERBATIM_GUARDED_BY(mutex_);
  std::map<wire::Secret, Listen> listens_ VERBATIM_GUARDED_BY(mutex_);
};

}  // namespace verbatim
