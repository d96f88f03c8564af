// A handshake message that is received in as many parts as the socket has.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/socket.h"
#include "wire/authentication.h"
#include "wire/handshake.h"

namespace verbatim {

class IncomingMessage {
 public:
  // Before receive(): true when the header and the first `bytes` of the body have arrived. No memory is taken for the
  // rest. Errors as for receive(), as soon as the header has arrived.
  Result<bool> receive_first(const UniqueFd& socket, std::size_t bytes) {
    const Result<bool> read = read_up_to(wire::kHeaderBytes + bytes, socket);
    if (!read || filled_ < wire::kHeaderBytes) return read;
    const Status valid = read_header();
    if (!valid) return valid.error();
    if (header_.body_bytes < bytes) return Error{ErrorKind::kRemote, EPROTO, "handshake"};
    return read;
  }
  // True when the message is complete. EPROTO: it is of another protocol or of another version.
  Result<bool> receive(const UniqueFd& socket) {
    const Result<bool> first = receive_first(socket, 0);
    if (!first || !*first) return first;
    return read_up_to(wire::kHeaderBytes + header_.body_bytes, socket);
  }

  // Of a complete message: whether it ends with a MAC of `key`, see has_mac(). Then body() is without it.
  bool authenticate(const wire::Key& key, std::span<const std::uint8_t> context = {}) {
    return is_authenticated_ = wire::has_mac(bytes_, key, context);
  }

  wire::Mac mac() const { return wire::mac_of(bytes_); }

  bool begun() const { return filled_ != 0; }
  // Once the header has arrived.
  wire::MessageType type() const { return header_.type; }
  std::size_t body_bytes() const { return header_.body_bytes; }
  // Of a complete message; after receive_first() its beginning.
  std::span<const std::uint8_t> body() const {
    const std::size_t end = bytes_.size() - (is_authenticated_ ? wire::kMacBytes : 0);
    return std::span(bytes_).first(end).subspan(wire::kHeaderBytes);
  }
  // The protocol version of the sender, if that made the call fail.
  std::optional<std::uint16_t> other_version() const { return other_version_; }

 private:
  Result<bool> read_up_to(std::size_t end, const UniqueFd& socket) {
    if (bytes_.size() < end) bytes_.resize(end);
    return filled_ == bytes_.size() ? Result<bool>(true) : receive_into(socket, bytes_, filled_);
  }
  Status read_header() {
    const std::span<const std::uint8_t, wire::kHeaderBytes> bytes(bytes_.data(), wire::kHeaderBytes);
    const Result<wire::Header> header = wire::decode_header(bytes);
    if (!header && header.error().kind == ErrorKind::kUsage) other_version_ = wire::protocol_version(bytes);
    if (!header) return Error{ErrorKind::kRemote, EPROTO, header.error().operation};
    header_ = *header;
    return {};
  }

  std::vector<std::uint8_t> bytes_;
  std::size_t filled_ = 0;
  wire::Header header_{};
  bool is_authenticated_ = false;
  std::optional<std::uint16_t> other_version_;
};

}  // namespace verbatim
