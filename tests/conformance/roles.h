// The roles of the other process in process_test.cc and settings_test.cc, and constants that both processes use.
#pragma once

#include <cstddef>

namespace conformance {

// Role "receiver": writes a handle, accepts and receives kMessages messages of message_bytes(i) with content i + 1: the
// first half as single messages, the others in groups. Checks them, writes a byte, closes and exits with status 0.
constexpr std::size_t kMessages = 160;
constexpr std::size_t message_bytes(std::size_t i) {
  return i % 7 == 0 ? 0 : 37 * i + (i % 40 == 1 ? 600'000 : 0);
}
// Role "idle": writes a handle, accepts and posts two receives. When the first is done, it writes a byte and waits
// until it is killed.
// Role "init": calls init, devices and finalize. Writes "init RESULT", "devices N" and each warning as lines.
// Role "leave": connects to itself and returns from main with open comms, outstanding requests and a running thread.

}  // namespace conformance
