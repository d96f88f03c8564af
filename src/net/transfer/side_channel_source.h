// Where the monitor gets the side channels that peers have made again. The listener implements SideChannelSource, so
// net/monitor needs no include of net/connect.
#pragma once

#include <vector>

#include "base/unique_fd.h"
#include "wire/handshake.h"

namespace verbatim {

// Any thread. The monitor calls it under the mutex of its table: the implementation must not call the monitor.
class SideChannelSource {
 public:
  struct Resumed {
    int key;  // of add()
    UniqueFd socket;
  };

  // From now on the peer of this connection may make the side channel again. `key`: the caller's own.
  virtual void add_connection(const wire::ConnectionId& connection, int key) = 0;
  virtual void remove_connection(const wire::ConnectionId& connection) noexcept = 0;

  // The side channels since the last call. Never blocks.
  virtual std::vector<Resumed> take_resumed() = 0;

 protected:
  ~SideChannelSource() = default;
};

}  // namespace verbatim
