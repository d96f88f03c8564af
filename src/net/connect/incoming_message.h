// A handshake message that is received in as many parts as the socket has.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/socket.h"
#include "wire/handshake.h"

namespace verbatim {

class IncomingMessage {
 public:
  // True when the message is complete. EPROTO: it is of another protocol or of another version.
  Result<bool> receive(const UniqueFd& socket) {
    while (true) {
      const Result<bool> all = receive_into(socket, bytes_, filled_);
      if (!all || !*all) return all;
      const std::span<const std::uint8_t, wire::kHeaderBytes> header_bytes(bytes_.data(), wire::kHeaderBytes);
      const Result<wire::Header> header = wire::decode_header(header_bytes);
      if (!header && header.error().kind == ErrorKind::kUsage) other_version_ = wire::protocol_version(header_bytes);
      if (!header) return Error{ErrorKind::kRemote, EPROTO, header.error().operation};
      type_ = header->type;
      if (filled_ == wire::kHeaderBytes + header->body_bytes) return true;
      bytes_.resize(wire::kHeaderBytes + header->body_bytes);
    }
  }

  bool begun() const { return filled_ != 0; }
  // Of a complete message.
  wire::MessageType type() const { return type_; }
  std::span<const std::uint8_t> body() const { return std::span(bytes_).subspan(wire::kHeaderBytes); }
  // The protocol version of the sender, if that made receive() fail.
  std::optional<std::uint16_t> other_version() const { return other_version_; }

 private:
  std::vector<std::uint8_t> bytes_ = std::vector<std::uint8_t>(wire::kHeaderBytes);  // header, later header and body
  std::size_t filled_ = 0;
  wire::MessageType type_ = {};
  std::optional<std::uint16_t> other_version_;
};

}  // namespace verbatim
