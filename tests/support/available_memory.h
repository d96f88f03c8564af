// Available memory of the machine, for tests that need gibibytes.
#pragma once

#include <cstddef>
#include <fstream>
#include <string>

namespace verbatim::test {

// Bytes that can be allocated without swapping; 0 when the kernel does not report MemAvailable.
inline std::size_t available_memory() {
  std::ifstream lines("/proc/meminfo");
  for (std::string name, rest; lines >> name && std::getline(lines, rest);) {
    if (name == "MemAvailable:") return std::stoul(rest) * 1024;
  }
  return 0;
}

}  // namespace verbatim::test
