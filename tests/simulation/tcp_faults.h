// What goes wrong with the TCP connections of a run. All times are known before it begins.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "simulation/scheduler.h"

namespace simulation {

constexpr std::size_t kInterfaces = 2;  // of the simulated host

struct TcpFaults {
  // Of one connection: it is reset, or nothing arrives any more.
  struct Break {
    std::uint64_t number = 0;  // in the order in which connections are made, from 1
    Time after = 0;            // since it was begun
    bool resets = false;
  };
  // Of a process, at one of the interfaces: nothing arrives, or connections to it are refused.
  struct Outage {
    std::size_t process = 0;
    std::size_t interface = 0;
    Time begin = 0;
    Time end = 0;  // kNever: it does not end
    bool refuses = false;
  };
  static constexpr std::size_t kMost = 8;

  std::size_t interfaces = 1;  // that the host has
  std::array<Break, kMost> breaks{};
  std::size_t break_count = 0;
  std::array<Outage, kMost> outages{};
  std::size_t outage_count = 0;

  void add(const Break& one) { breaks.at(break_count++) = one; }
  void add(const Outage& one) { outages.at(outage_count++) = one; }
};

}  // namespace simulation
