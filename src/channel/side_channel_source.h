// Where the monitor gets the side channels that peers have made again. The listener implements SideChannelSource, so
// net/monitor needs no include of it.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "base/unique_fd.h"
#include "wire/handshake.h"

namespace verbatim {

// Any thread. The monitor adds and removes connections under the mutex of its table: the implementation must not call
// the monitor.
class SideChannelSource {
 public:
  struct Resumed {
    wire::ConnectionEnd end;
    int key;  // of add_connection()
    UniqueFd socket;
  };

  // Called with a descriptor that becomes readable when a peer makes a side channel again.
  using Watch = std::function<void(int descriptor)>;

  // From now on the peer of this end may make the side channel again. `key`: the caller's own.
  virtual void add_connection(const wire::ConnectionEnd& end, int key) = 0;
  // `last`: the notice for a peer that makes the side channel again later, kClose or kFailed; nullopt: the peer has
  // ended the connection.
  virtual void remove_connection(const wire::ConnectionEnd& end, std::optional<wire::MessageType> last) noexcept = 0;

  // The side channels since the last call, at most one of each connection. Never blocks. It may log: not to be called
  // under a mutex. The connection may have been removed since. Calls `watch` before, while the descriptors cannot be
  // closed.
  virtual std::vector<Resumed> take_resumed(const Watch& watch) = 0;

 protected:
  ~SideChannelSource() = default;
};

}  // namespace verbatim
