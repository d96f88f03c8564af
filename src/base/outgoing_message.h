// A message that is sent in as many parts as the socket accepts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/socket.h"

namespace verbatim {

class OutgoingMessage {
 public:
  OutgoingMessage() = default;
  explicit OutgoingMessage(std::vector<std::uint8_t> bytes) : bytes_(std::move(bytes)) {}

  // Sends what the socket accepts now. True when the kernel has accepted all bytes.
  Result<bool> send(const UniqueFd& socket) { return send_from(socket, bytes_, sent_); }

 private:
  std::vector<std::uint8_t> bytes_;
  std::size_t sent_ = 0;
};

}  // namespace verbatim
