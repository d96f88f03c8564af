#include "net/side_channel.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/socket.h"

namespace verbatim {

Result<std::optional<SideChannel::Message>> SideChannel::receive(const UniqueFd& socket) {
  const Result<bool> begun = receive_into(socket, std::span(in_).first(wire::kHeaderBytes), filled_);
  if (!begun) return begun.error();
  if (!*begun) return std::optional<Message>();
  const Result<wire::Header> header =
      wire::decode_header(std::span<const std::uint8_t, wire::kHeaderBytes>(in_.data(), wire::kHeaderBytes));
  if (!header || header->body_bytes > wire::kMaxNoticeBody) {
    return Error{ErrorKind::kRemote, EPROTO, "a message on the side channel"};
  }
  const Result<bool> whole =
      receive_into(socket, std::span(in_).first(wire::kHeaderBytes + header->body_bytes), filled_);
  if (!whole) return whole.error();
  if (!*whole) return std::optional<Message>();
  filled_ = 0;
  return std::optional<Message>(Message{header->type, std::span(in_).subspan(wire::kHeaderBytes, header->body_bytes)});
}

bool SideChannel::send(const UniqueFd& socket, const wire::Notice& notice) {
  flush(socket);
  const std::span<const std::uint8_t> bytes = notice.bytes();
  if (bytes.size() > out_.size() - waiting_) return false;
  std::copy(bytes.begin(), bytes.end(), out_.begin() + static_cast<std::ptrdiff_t>(waiting_));
  waiting_ += bytes.size();
  flush(socket);
  return true;
}

bool SideChannel::flush(const UniqueFd& socket) {
  while (waiting_ != 0) {
    const ssize_t count = ::send(socket.get(), out_.data(), waiting_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) {
      waiting_ -= static_cast<std::size_t>(count);
      std::memmove(out_.data(), out_.data() + count, waiting_);
    } else if (errno == EAGAIN) {
      return false;
    } else if (errno != EINTR) {
      waiting_ = 0;
    }
  }
  return true;
}

}  // namespace verbatim
