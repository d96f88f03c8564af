// What this program does as the other process of a test. Warnings of the plugin go to standard output.
#pragma once

#include <cstddef>
#include <cstdint>

namespace conformance {

constexpr std::size_t kBytes = 1000;
constexpr int kTag = 7;

// Exit statuses of a role whose comm has failed: the plugin's answer and this.
constexpr int kAnswered = 100;

// "rests" accepts a connection, writes 'r' and does nothing. "receives" posts a receive and tests it until it is done
// or fails. "closes" accepts, closes in peace, writes 'r' and waits for a byte. "sends" reads a handle, connects, and
// sends one message, testing it until it is done or fails.
//
// Of the program that ends peers in the handshake: "accepts SIGNAL PLACE" and "connects SIGNAL PLACE" make a
// connection, receive or send one message and close, and on the way send themselves the signal at this place: a number
// or a name (places.h). "supplies" reads handles until there are no more, connects to each and sends it one message.
constexpr std::uint64_t kSeed = 3;  // of such a message's content

}  // namespace conformance
