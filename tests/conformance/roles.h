// What the two processes of a test must agree on.
#pragma once

#include <cstddef>

namespace conformance {

// Role "receiver": writes a handle, accepts, receives kMessages messages of message_bytes(i) with content i + 1, the
// first half one by one, the rest in groups, checks them and leaves with 0.
constexpr std::size_t kMessages = 160;
constexpr std::size_t message_bytes(std::size_t i) {
  return i % 7 == 0 ? 0 : 37 * i + (i % 40 == 1 ? 600'000 : 0);
}
// Role "idle": writes a handle, accepts, posts two receives, and when the first is done writes a byte and waits to be
// killed.
// Role "init": init, devices, finalize; writes "init RESULT", "devices N" and every warning, a line each.
// Role "leave": connects to itself, leaves traffic and comms open, returns from main with its threads running.

}  // namespace conformance
