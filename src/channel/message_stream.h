// The messages that cross a socket: one that has arrived in part, and bytes that the socket has not accepted yet.
// Channel has one; the connector and the listen comm make a temporary one for a failure notice. Nothing here blocks.
// Bytes that are not sent take memory, and messages that are longer than any notice.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

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

  // `max_body`: of a message that is received, in bytes.
  explicit MessageStream(std::uint32_t max_body) : max_body_(max_body) {}
  MessageStream() = default;

  // Returns the next message, nullopt when it has not arrived completely. Errors: end of file (0) or another error of
  // the socket, also one that add() or flush() has found; EPROTO when the header is invalid or announces a longer
  // body; ENOMEM.
  Result<std::optional<Message>> receive(const UniqueFd& socket);

  // For flush(). Returns false, and drops the message, when too much is not sent, because the peer has not read for a
  // long time, or when there is no memory.
  bool add(const UniqueFd& socket, std::span<const std::uint8_t> message);
  // Sends the buffered bytes. Returns true when the buffer is empty. If the connection is broken, the buffered bytes
  // are dropped.
  bool flush(const UniqueFd& socket);
  bool has_unsent() const { return !unsent_.empty(); }
  // For another socket: messages in part are dropped.
  void reset();

 private:
  Result<bool> read_up_to(std::span<std::uint8_t> buffer, const UniqueFd& socket);
  Result<bool> read_long(std::size_t bytes, const UniqueFd& socket);
  // Sends the beginning of `bytes`, all of it if the socket accepts it. Returns how much it was. After an error all
  // bytes count as sent.
  std::size_t send_some(const UniqueFd& socket, std::span<const std::uint8_t> bytes);

  const std::uint32_t max_body_ = wire::kMaxNoticeBody;
  int send_error_ = 0;  // errno of a send that failed
  std::array<std::uint8_t, wire::kMaxNoticeBytes> received_;
  std::size_t received_bytes_ = 0;
  std::vector<std::uint8_t> unsent_;
  std::unique_ptr<std::vector<std::uint8_t>> long_;  // a message that does not fit `received_`, or its beginning
};

}  // namespace verbatim
