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

// Owned by the monitor; all functions are called under the table's mutex: advance() by the monitoring thread,
// count_destroyed() by a thread of DeviceCalls, the others by the threads that close.
class GracefulCloses {
 public:
  explicit GracefulCloses(const Poller& poller) : poller_(poller) {}

  // Before the first close of `owner`: the closes themselves then do not allocate.
  void add_owner(const void* owner) { counts_.try_emplace(owner, 0); }
  void begin(ConnectionTable& table, std::unique_ptr<Comm> comm, std::uint64_t timeout_ns)
      VERBATIM_REQUIRES(table.mutex);
  // Returns when no comm of `owner` is closing or being destroyed. Releases the mutex while it waits.
  void wait(ConnectionTable& table, const void* owner) VERBATIM_REQUIRES(table.mutex);
  // The closes of `owner` do not wait for the peer any longer.
  static void expire(ConnectionTable& table, const void* owner) VERBATIM_REQUIRES(table.mutex);

  // Sends close messages; moves connections whose close is over from the table to their DeviceCalls.
  void advance(ConnectionTable& table, std::uint64_t now) VERBATIM_REQUIRES(table.mutex);
  void count_destroyed(const void* owner) { --counts_.find(owner)->second; }

 private:
  const Poller& poller_;
  std::map<const void*, std::size_t> counts_;  // closing or being destroyed, by owner
};

}  // namespace verbatim
