// The virtual clock of ports with a rate: its trace, and hold and release.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace verbatim::test {

struct TraceEntry {
  std::uint64_t ns;
  std::string port;
  std::uint32_t qpn;
  std::string to;
  std::uint32_t to_qpn;
  std::uint64_t bytes;
  std::uint64_t arrival_ns;
};

// All lines of the file SOFTVERBS_TRACE.
std::vector<TraceEntry> read_trace();

// Runs softverbs-control.
void run_control(const std::string& subcommand);

// Holds the virtual clock during its lifetime: no message is sent, and the trace file is complete.
class Hold {
 public:
  Hold() { run_control("hold"); }
  ~Hold() { run_control("release"); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
};

}  // namespace verbatim::test
