// The connections to a listening socket of a job that have not sent their first frame. Every process that reaches the
// socket can make some, so what they can take is limited: their number, their time, and the size of the first frame.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/unique_fd.h"
#include "ranks/frame.h"

namespace verbatim::ranks {

// More than a Hello has, so that a rank of another build gets the reason why it is refused.
constexpr std::size_t kMaxFirstFrameBytes = 256;

class NewConnections {
 public:
  struct Arrived {
    UniqueFd socket;
    FrameReader reader;  // of what comes behind the first frame
    Frame first;         // kMaxFirstFrameBytes at most
  };

  // A rank sends its first frame right after it has connected.
  struct Limits {
    std::size_t connections = 64;
    std::uint64_t first_frame_ns = 3 * kNanosecondsPerSecond;
  };

  // `listener` is a non-blocking listening socket.
  NewConnections(UniqueFd listener, const Limits& limits) : listener_(std::move(listener)), limits_(limits) {}

  // Accepts connections, and returns those whose first frame has arrived. Of too many others the oldest are closed, and
  // all that have waited for too long; at a local socket also those of other users. Does not wait.
  std::vector<Arrived> take();

  // The sockets that take() reads.
  void add_to(std::vector<pollfd>& polled) const;
  const UniqueFd& listener() const { return listener_; }

 private:
  struct Waiting {
    UniqueFd socket;
    FrameReader reader;
    std::uint64_t deadline_ns;
  };

  const UniqueFd listener_;
  const Limits limits_;
  std::vector<Waiting> waiting_;  // the oldest first
};

}  // namespace verbatim::ranks
