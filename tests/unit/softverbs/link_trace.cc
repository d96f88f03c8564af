#include "link_trace.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>

namespace verbatim::test {

std::vector<TraceEntry> read_trace() {
  std::ifstream file(std::getenv("SOFTVERBS_TRACE"));
  std::vector<TraceEntry> all;
  for (std::string line; std::getline(file, line);) {
    TraceEntry entry{};
    unsigned long long ns = 0;
    unsigned long long bytes = 0;
    unsigned long long arrival = 0;
    char port[32];
    char to[32];
    const int fields = std::sscanf(
        line.c_str(),
        R"({"ns":%llu,"port":"%31[^"]","qpn":%u,"to":"%31[^"]","to_qpn":%u,"bytes":%llu,"arrival_ns":%llu})", &ns, port,
        &entry.qpn, to, &entry.to_qpn, &bytes, &arrival);
    EXPECT_EQ(fields, 7) << line;
    entry.ns = ns;
    entry.port = port;
    entry.to = to;
    entry.bytes = bytes;
    entry.arrival_ns = arrival;
    all.push_back(entry);
  }
  return all;
}

void run_control(const std::string& subcommand) {
  ASSERT_EQ(std::system((std::string(std::getenv("SOFTVERBS_CONTROL")) + " " + subcommand).c_str()), 0) << subcommand;
}

}  // namespace verbatim::test
