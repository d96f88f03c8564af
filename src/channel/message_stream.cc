#include "channel/message_stream.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/socket.h"

namespace verbatim {

void MessageStream::begin(const wire::Key& key, std::uint64_t own) {
  reset();
  key_ = key;
  own_ = own;
  next_sent_ = next_received_ = 0;
}

void MessageStream::reset() {
  received_bytes_ = 0;
  unsent_ = std::vector<std::uint8_t>();
  long_.reset();
  send_error_ = 0;
}

// The kernel reports the error of a connection once; later calls on the socket find an end of file.
Result<bool> MessageStream::read_up_to(std::span<std::uint8_t> buffer, const UniqueFd& socket) {
  Result<bool> all = receive_into(socket, buffer, received_bytes_);
  if (!all && all.error().sys_errno == 0 && send_error_ != 0) return Error{ErrorKind::kRemote, send_error_, "send"};
  return all;
}

Result<bool> MessageStream::read_long(std::size_t bytes, const UniqueFd& socket) try {
  if (long_ == nullptr) {
    long_ = std::make_unique<std::vector<std::uint8_t>>(bytes);
    std::copy_n(received_.begin(), wire::kHeaderBytes, long_->begin());
  }
  return read_up_to(*long_, socket);
} catch (...) {
  return Error{ErrorKind::kSystem, ENOMEM, "a message on the side channel"};
}

Result<std::optional<MessageStream::Message>> MessageStream::receive(const UniqueFd& socket) {
  if (received_bytes_ == 0) long_.reset();
  const std::span<std::uint8_t, wire::kHeaderBytes> first = std::span(received_).first<wire::kHeaderBytes>();
  if (received_bytes_ < first.size()) {
    const Result<bool> begun = read_up_to(first, socket);
    if (!begun) return begun.error();
    if (!*begun) return std::optional<Message>();
  }
  const Result<wire::Header> header = wire::decode_header(first, max_body_ + wire::kMacBytes);
  if (!header) return Error{ErrorKind::kRemote, EPROTO, "a message on the side channel"};
  const std::size_t bytes = first.size() + header->body_bytes;
  const bool is_long = bytes > received_.size();
  const Result<bool> whole = is_long ? read_long(bytes, socket) : read_up_to(std::span(received_).first(bytes), socket);
  if (!whole) return whole.error();
  if (!*whole) return std::optional<Message>();
  received_bytes_ = 0;
  const std::span<std::uint8_t> message = is_long ? std::span(*long_) : std::span(received_).first(bytes);
  if (!wire::has_mac(message, key_, wire::message_context(1 - own_, next_received_)))
    return Error{ErrorKind::kRemote, EBADMSG, "a message on the side channel"};
  ++next_received_;
  return std::optional<Message>(
      Message{header->type, message.subspan(first.size(), header->body_bytes - wire::kMacBytes)});
}

bool MessageStream::add(const UniqueFd& socket, std::span<const std::uint8_t> message) {
  if (unsent_.size() > wire::kMaxNoticeBytes && !flush(socket)) return false;
  const std::size_t begin = unsent_.size();
  try {
    unsent_.resize(begin + message.size() + wire::kMacBytes);
  } catch (...) {
    return false;
  }
  const std::span<std::uint8_t> added = std::span(unsent_).subspan(begin);
  std::ranges::copy(message, added.begin());
  wire::put_mac(added, key_, wire::message_context(own_, next_sent_++));
  return true;
}

std::size_t MessageStream::send_some(const UniqueFd& socket, std::span<const std::uint8_t> bytes) {
  std::size_t sent = 0;
  const Result<bool> all = send_from(socket, bytes, sent);
  if (all) return sent;
  const int error = all.error().sys_errno;
  if (send_error_ == 0 && error != EPIPE) send_error_ = error;  // EPIPE: receive() finds the end of file
  return bytes.size();
}

bool MessageStream::flush(const UniqueFd& socket) {
  const std::size_t sent = send_some(socket, unsent_);
  unsent_.erase(unsent_.begin(), unsent_.begin() + static_cast<std::ptrdiff_t>(sent));
  if (unsent_.empty()) unsent_ = std::vector<std::uint8_t>();  // without its memory
  return !has_unsent();
}

}  // namespace verbatim
