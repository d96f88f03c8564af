// The messages that cross a socket: one that has arrived in part, and bytes that the socket has not accepted yet.
// Channel has one; the connector and the listen comm make a temporary one for a failure notice. Nothing here allocates
// or blocks.
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

class MessageStream {
 public:
  struct Message {
    wire::MessageType type;
    std::span<std::uint8_t> body;  // valid until the next receive
  };

  // Returns the next message, nullopt when it has not arrived completely. Errors: end of file (0) or another error of
  // the socket, also one that send() or flush() has found; EPROTO when the header is invalid or announces a body longer
  // than any notice.
  Result<std::optional<Message>> receive(const UniqueFd& socket);

  // Returns false, and drops the notice, when the buffer has too little free space: the peer has not read for a long
  // time.
  bool send(const UniqueFd& socket, const wire::Notice& notice);
  // Sends the buffered bytes. Returns true when the buffer is empty. If the connection is broken, the buffered bytes
  // are dropped.
  bool flush(const UniqueFd& socket);
  bool has_unsent() const { return unsent_bytes_ != 0; }
  // For another socket: messages in part are dropped.
  void reset() {
    received_bytes_ = unsent_bytes_ = 0;
    send_error_ = 0;
  }

 private:
  Result<bool> read_up_to(std::size_t end, const UniqueFd& socket);

  std::array<std::uint8_t, wire::kMaxNoticeBytes> received_;
  std::size_t received_bytes_ = 0;
  std::array<std::uint8_t, wire::kMaxNoticeBytes + 4 * wire::kHeaderBytes> unsent_;
  std::size_t unsent_bytes_ = 0;
  int send_error_ = 0;  // errno of a send that failed
};

}  // namespace verbatim
