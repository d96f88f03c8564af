#include "channel/message_stream.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/socket.h"

namespace verbatim {

// The kernel reports the error of a connection once; later calls on the socket find an end of file.
Result<bool> MessageStream::read_up_to(std::size_t end, const UniqueFd& socket) {
  Result<bool> all = receive_into(socket, std::span(received_).first(end), received_bytes_);
  if (!all && all.error().sys_errno == 0 && send_error_ != 0) return Error{ErrorKind::kRemote, send_error_, "send"};
  return all;
}

Result<std::optional<MessageStream::Message>> MessageStream::receive(const UniqueFd& socket) {
  const Result<bool> begun = read_up_to(wire::kHeaderBytes, socket);
  if (!begun) return begun.error();
  if (!*begun) return std::optional<Message>();
  const Result<wire::Header> header =
      wire::decode_header(std::span<const std::uint8_t, wire::kHeaderBytes>(received_.data(), wire::kHeaderBytes));
  if (!header || header->body_bytes > wire::kMaxNoticeBody) {
    return Error{ErrorKind::kRemote, EPROTO, "a message on the side channel"};
  }
  const Result<bool> whole = read_up_to(wire::kHeaderBytes + header->body_bytes, socket);
  if (!whole) return whole.error();
  if (!*whole) return std::optional<Message>();
  received_bytes_ = 0;
  return std::optional<Message>(
      Message{header->type, std::span(received_).subspan(wire::kHeaderBytes, header->body_bytes)});
}

bool MessageStream::send(const UniqueFd& socket, const wire::Notice& notice) {
  flush(socket);
  const std::span<const std::uint8_t> bytes = notice.bytes();
  if (bytes.size() > unsent_.size() - unsent_bytes_) return false;
  std::copy(bytes.begin(), bytes.end(), unsent_.begin() + static_cast<std::ptrdiff_t>(unsent_bytes_));
  unsent_bytes_ += bytes.size();
  flush(socket);
  return true;
}

bool MessageStream::flush(const UniqueFd& socket) {
  while (unsent_bytes_ != 0) {
    const ssize_t count = ::send(socket.get(), unsent_.data(), unsent_bytes_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) {
      unsent_bytes_ -= static_cast<std::size_t>(count);
      std::memmove(unsent_.data(), unsent_.data() + count, unsent_bytes_);
    } else if (errno == EAGAIN) {
      return false;
    } else if (errno != EINTR) {
      if (send_error_ == 0 && errno != EPIPE) send_error_ = errno;  // EPIPE: receive() finds the end of file
      unsent_bytes_ = 0;
    }
  }
  return true;
}

}  // namespace verbatim
