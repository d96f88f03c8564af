// A dense all-to-all in slots: every PE has q QPs to each other one, with the same number of quanta on each; a sender
// serves its QPs round robin by number, one quantum a slot; a receiving port takes in one quantum a slot, first come,
// first served. All start together.
#pragma once

#include <cstddef>
#include <cstdint>

namespace verbatim::model {

constexpr unsigned kMostPes = 4096;

// Order of a PE's QPs by number.
struct Order {
  const char* name;
  bool interleaved;  // the first QPs of all peers, then the second ones; else all of a peer in a row
  bool rotated;      // from the PE behind oneself on; else from PE 0 on
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
  double efficiency = 0;    // of the receiving ports, until all have everything
  std::size_t deepest = 0;  // quanta that wait at one port
  double first_mean = 0;    // until a receiver has its first quantum of a sender
  std::uint64_t first_max = 0;
  unsigned senders = 0;          // to one receiver in one slot
  double jain = 1;               // the least of all senders, of quanta when the first of its peers has everything
  std::uint64_t inversions = 0;  // pairs of one PE's QPs that lie otherwise than interleaved and rotated
};

Figures simulate(const Shape& shape, const Order& order);

}  // namespace verbatim::model
