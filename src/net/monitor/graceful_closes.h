// Comms that their owner has closed and whose QPs stay alive until the peer has closed too:
//
//   watched --close_gracefully--> closing --peer's close, end of file or deadline--> being destroyed (DeviceCalls)
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "net/monitor/connection_table.h"
#include "net/monitor/poller.h"

namespace verbatim {

// Owned by the monitor. All functions are called under the table's mutex. The monitoring thread calls advance(), a
// thread of DeviceCalls calls count_destroyed(), the thread that establishes a comm calls add_owner(), and the threads
// that close comms or end a context call the others.
class GracefulCloses {
 public:
  explicit GracefulCloses(const Poller& poller) : poller_(poller) {}

  // Must be called before the first close of `owner`. Allocates the counter of this owner, so that begin() allocates
  // nothing.
  void add_owner(const void* owner) { counts_.try_emplace(owner, 0); }
  void begin(ConnectionTable& table, std::unique_ptr<Comm> comm, std::uint64_t timeout_ns)
      VERBATIM_REQUIRES(table.mutex);
  // Returns when no comm of `owner` is closing or being destroyed. Releases the mutex while it waits.
  void wait(ConnectionTable& table, const void* owner) VERBATIM_REQUIRES(table.mutex);
  // The closes of `owner` do not wait for the peer any longer.
  static void expire(ConnectionTable& table, const void* owner) VERBATIM_REQUIRES(table.mutex);

  // Sends close messages. When both ends have closed or the deadline has passed, moves a connection from the table to
  // its DeviceCalls, which destroys the comm. While a request for its QP state is open, the connection stays.
  void advance(ConnectionTable& table, std::uint64_t now) VERBATIM_REQUIRES(table.mutex);
  void count_destroyed(const void* owner) { --counts_.find(owner)->second; }

 private:
  const Poller& poller_;
  std::map<const void*, std::size_t> counts_;  // of each owner: comms closing or being destroyed
};

}  // namespace verbatim
