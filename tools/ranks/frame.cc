#include "ranks/frame.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "ranks/failure.h"

namespace verbatim::ranks {
namespace {

constexpr std::uint32_t kMagic = 0x46505256;  // "VRPF"
constexpr int kSendTimeoutMs = 10'000;

struct Header {
  std::uint32_t magic;
  FrameKind kind;
  std::uint64_t bytes;
};

}  // namespace

bool send_frame(int socket, FrameKind kind, std::string_view payload) {
  const Header header{kMagic, kind, payload.size()};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  bytes.append(payload);
  std::size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t n = ::send(socket, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n >= 0) {
      sent += static_cast<std::size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      pollfd writable{socket, POLLOUT, 0};
      if (::poll(&writable, 1, kSendTimeoutMs) <= 0) return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

FrameReader::State FrameReader::read(int socket) {
  char block[65536];
  const std::size_t most = sizeof(Header) + max_payload_bytes_;
  while (bytes_.size() < most) {
    const ssize_t n = ::recv(socket, block, std::min(sizeof block, most - bytes_.size()), MSG_DONTWAIT);
    if (n > 0) {
      bytes_.append(block, static_cast<std::size_t>(n));
    } else if (n < 0 && errno == EINTR) {
      continue;
    } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      break;
    } else {
      return State::kClosed;
    }
  }
  return broken_ ? State::kClosed : State::kOpen;
}

std::optional<Frame> FrameReader::next() {
  Header header{};
  if (broken_ || bytes_.size() < sizeof header) return std::nullopt;
  std::memcpy(&header, bytes_.data(), sizeof header);
  if (header.magic != kMagic || header.bytes > max_payload_bytes_) {
    broken_ = true;
    return std::nullopt;
  }
  if (bytes_.size() - sizeof header < header.bytes) return std::nullopt;
  Frame frame{header.kind, bytes_.substr(sizeof header, header.bytes)};
  bytes_.erase(0, sizeof header + header.bytes);
  return frame;
}

std::string to_payload(const Reason& reason) {
  return to_bytes(reason.status) + reason.text;
}

Reason reason_in(const std::string& payload) {
  Reason reason;
  if (payload.size() < sizeof reason.status) return reason;
  std::memcpy(&reason.status, payload.data(), sizeof reason.status);
  reason.text = payload.substr(sizeof reason.status);
  return reason;
}

std::string pack(const std::vector<std::string>& parts) {
  std::string packed;
  for (const std::string& part : parts) {
    const std::uint64_t bytes = part.size();
    packed.append(reinterpret_cast<const char*>(&bytes), sizeof bytes);
    packed.append(part);
  }
  return packed;
}

std::vector<std::string> unpack(std::string_view packed) {
  std::vector<std::string> parts;
  while (!packed.empty()) {
    std::uint64_t bytes = 0;
    if (packed.size() < sizeof bytes) throw Failure("malformed message between ranks");
    std::memcpy(&bytes, packed.data(), sizeof bytes);
    packed.remove_prefix(sizeof bytes);
    if (packed.size() < bytes) throw Failure("malformed message between ranks");
    parts.emplace_back(packed.substr(0, bytes));
    packed.remove_prefix(bytes);
  }
  return parts;
}

}  // namespace verbatim::ranks
