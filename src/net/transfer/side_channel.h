// One end of a side channel as the control thread keeps it: messages are cut out of what the socket brings, and what it
// does not take at once waits. Nothing here allocates or blocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/result.h"
#include "base/unique_fd.h"
#include "wire/notice.h"

namespace verbatim {

class SideChannel {
 public:
  struct Message {
    wire::MessageType type;
    std::span<std::uint8_t> body;  // valid until the next receive
  };

  // The next message, nullopt when it has not come as a whole. An error: the end of the file, or no messages of ours.
  Result<std::optional<Message>> receive(const UniqueFd& socket);

  // False when there is no room for it: the peer has not been reading for long.
  bool send(const UniqueFd& socket, const wire::Notice& notice);
  // Pushes what waits; true when nothing waits any more. What a peer that is gone should have heard has no need to
  // wait.
  bool flush(const UniqueFd& socket);

 private:
  std::array<std::uint8_t, wire::kMaxNoticeBytes> received_;
  std::size_t received_bytes_ = 0;
  std::array<std::uint8_t, wire::kMaxNoticeBytes + 4 * wire::kHeaderBytes> unsent_;
  std::size_t unsent_bytes_ = 0;
};

}  // namespace verbatim
