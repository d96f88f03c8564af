// What this program does as the other process of a test. Warnings of the plugin go to standard output.
#pragma once

#include <cstddef>

namespace conformance {

constexpr std::size_t kBytes = 1000;
constexpr int kTag = 7;

// Exit statuses of a role whose comm has failed: the plugin's answer and this.
constexpr int kAnswered = 100;

// "rests" accepts a connection, writes 'r' and does nothing. "receives" posts a receive and tests it until it is done
// or fails. "closes" accepts, closes in peace, writes 'r' and waits for a byte. "sends" reads a handle, connects, and
// sends one message, testing it until it is done or fails.

}  // namespace conformance
