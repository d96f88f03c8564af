// The roles of this program as the peer process of a test. Warnings of the plugin go to standard output.
#pragma once

#include <cstddef>
#include <cstdint>

namespace conformance {

constexpr std::size_t kBytes = 1000;
constexpr int kTag = 7;

// When a comm of the role fails, the exit status is this plus the result of the plugin.
constexpr int kFailedResult = 100;

// Roles of `peers`: "idles" accepts a connection, writes 'r' and does nothing. "idles-with-worker" also forks a worker
// and writes its process ID. "receives" posts a receive and tests it until it is done or fails. "sends" reads a handle,
// connects, sends one message and tests it until it is done or fails.
//
// Roles of `handshake_ends`: "accepts SIGNAL POINT" and "connects SIGNAL POINT" establish a connection, receive or send
// one message and close. "connects" writes 'r' before it reads its handle. They send themselves the signal at this kill
// point, which is a number or a name (kill_points.h). "sends-to-each" reads handles until the end of its input,
// connects to each and sends it one message.
constexpr std::uint64_t kSeed = 3;  // seed of the contents of these messages

}  // namespace conformance
