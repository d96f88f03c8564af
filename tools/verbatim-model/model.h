// A dense all-to-all in slots of time: every PE has q QPs to each other PE, with the same number of quanta on each. A
// sender serves its QPs round robin by number, one quantum a slot. A receiving port receives one quantum a slot, in
// order of arrival. All PEs start together.
#pragma once

#include <cstddef>
#include <cstdint>

namespace verbatim::model {

constexpr unsigned kMaxPes = 4096;

// Order of a PE's QPs by number.
struct Order {
  const char* name;
  bool interleaved;  // the first QPs of all peers, then the second ones; else all QPs of a peer in a row
  bool rotated;      // starts with the PE after the own one; else with PE 0
};
constexpr Order kOrders[] = {
    {"peer-major", false, false},
    {"interleaved", true, false},
    {"peer-major, rotated", false, true},
    {"interleaved, rotated", true, true},
};

struct Shape {
  unsigned pes = 8;
  unsigned qps = 4;     // to each other PE
  unsigned quanta = 8;  // on each QP
};

// Times are in slots, from 0.
struct Figures {
  double efficiency = 0;    // of the receiving ports, until all quanta are received
  std::size_t deepest = 0;  // maximum number of quanta queued at one port
  double first_mean = 0;    // time until a receiver has its first quantum of a sender
  std::uint64_t first_max = 0;
  unsigned senders = 0;          // maximum number of senders to one receiver in one slot
  double jain = 1;               // minimum over the senders of Jain's index when the first peer has all its quanta
  std::uint64_t inversions = 0;  // pairs of QPs of one PE in the other order than interleaved and rotated
};

Figures simulate(const Shape& shape, const Order& order);

}  // namespace verbatim::model
