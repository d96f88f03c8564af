// The state of one end of a side channel: a message that has arrived in part, and bytes that the socket has not
// accepted yet. Owned by the monitor for each connection. Nothing here allocates or blocks.
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

  // The next message, nullopt when it has not arrived completely. Errors: end of file, or EPROTO for bytes that are no
  // message.
  Result<std::optional<Message>> receive(const UniqueFd& socket);

  // False when the buffer is full: the peer has not read for a long time.
  bool send(const UniqueFd& socket, const wire::Notice& notice);
  // Sends what is buffered; true when the buffer is empty. A broken connection empties it too.
  bool flush(const UniqueFd& socket);

 private:
  std::array<std::uint8_t, wire::kMaxNoticeBytes> received_;
  std::size_t received_bytes_ = 0;
  std::array<std::uint8_t, wire::kMaxNoticeBytes + 4 * wire::kHeaderBytes> unsent_;
  std::size_t unsent_bytes_ = 0;
};

}  // namespace verbatim
