// The messages that cross a socket: one that has arrived in part, and bytes that the socket has not accepted yet. Each
// ends with a MAC, which shows that the peer has sent it on this TCP connection, and as which one. Channel has a
// stream; the connector and the listen comm make a temporary one for a failure notice, and the listener for a last
// message. Nothing here blocks. Bytes that are not sent take memory, and messages that are longer than any notice.
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
#include "wire/authentication.h"
#include "wire/notice.h"

namespace verbatim {

class MessageStream {
 public:
  struct Message {
    wire::MessageType type;
    std::span<std::uint8_t> body;  // valid until the next receive
  };

  // `max_body`: of a message that is received, in bytes, without its MAC.
  explicit MessageStream(std::uint32_t max_body) : max_body_(max_body) {}
  MessageStream() = default;

  // For the messages of a TCP connection, whose MACs have this key. `own`: ConnectionEnd::connecting of this end,
  // whichever has made this TCP connection.
  void begin(const wire::Key& key, std::uint64_t own);
  // Whether a message has come whose MAC is right.
  bool has_received() const { return next_received_ != 0; }

  // Returns the next message, nullopt when it has not arrived completely. Errors: end of file (0) or another error of
  // the socket, also one that add() or flush() has found; EPROTO when the header is invalid or announces a longer
  // body; EBADMSG when the MAC is not that of the next message; ENOMEM.
  Result<std::optional<Message>> receive(const UniqueFd& socket);

  // For flush(). Returns false, and drops the message, when too much is not sent, because the peer has not read for a
  // long time, or when there is no memory.
  bool add(const UniqueFd& socket, std::span<const std::uint8_t> message);
  // Sends the buffered bytes. Returns true when the buffer is empty. If the connection is broken, the buffered bytes
  // are dropped.
  bool flush(const UniqueFd& socket);
  bool has_unsent() const { return !unsent_.empty(); }
  // Messages in part are dropped.
  void reset();

 private:
  Result<bool> read_up_to(std::span<std::uint8_t> buffer, const UniqueFd& socket);
  Result<bool> read_long(std::size_t bytes, const UniqueFd& socket);
  // Sends the beginning of `bytes`, all of it if the socket accepts it. Returns how much it was. After an error all
  // bytes count as sent.
  std::size_t send_some(const UniqueFd& socket, std::span<const std::uint8_t> bytes);

  const std::uint32_t max_body_ = wire::kMaxNoticeBody;
  int send_error_ = 0;  // errno of a send that failed
  wire::Key key_{};
  std::uint64_t own_ = 0;
  std::uint64_t next_sent_ = 0;  // sequence
  std::uint64_t next_received_ = 0;
  std::array<std::uint8_t, wire::kMaxNoticeBytes + wire::kMacBytes> received_;
  std::size_t received_bytes_ = 0;
  std::vector<std::uint8_t> unsent_;
  std::unique_ptr<std::vector<std::uint8_t>> long_;  // a message that does not fit `received_`, or its beginning
};

}  // namespace verbatim
