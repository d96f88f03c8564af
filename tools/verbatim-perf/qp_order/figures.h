// Computes the figures of an order from the plugin's VERBATIM_QP_DUMP and from the times at which messages were served.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace verbatim::perf::qp_order {

// A line of VERBATIM_QP_DUMP.
struct DumpedQp {
  std::string device;
  std::string side;
  std::string self;
  std::string peer;
  std::string traffic;
  std::uint32_t connection = 0;
  std::uint32_t index = 0;
  std::uint32_t qpn = 0;
  std::uint32_t block = 0;
  std::uint32_t peers = 0;
  std::uint32_t position = 0;
};
// Throws Failure when the file is not a dump.
std::vector<DumpedQp> read_dump(const std::string& path);

// Compares the send QPs, sorted by number, with the interleaved and rotated order.
struct Placement {
  std::size_t qps = 0;
  std::size_t exact = 0;       // at their position
  std::size_t inversions = 0;  // pairs in the wrong order
};
// `ranks` by identity.
Placement place_by_number(const std::vector<DumpedQp>& dump, const std::map<std::string, int>& ranks);

// A port has served a quantum of a sender (softverbs' clock), or a whole message was completed.
struct Service {
  int from = 0;
  int to = 0;
  std::uint64_t begin = 0;    // time at which the sender started
  std::uint64_t arrival = 0;  // time at which the last byte arrived
  std::uint64_t bytes = 0;
};

struct OrderFigures {
  double first_max = 0;  // time from the first service of all until a receiver had the first service of a sender
  double first_mean = 0;
  double jain = 1;  // minimum over the senders of Jain's index of bytes when the first peer has all its bytes
  int senders = 0;  // maximum number of senders to one receiver at the same time
};
// `unit`: of time. With the clock each service is one quantum. Without it only the end of each message is known; all
// begin at the same time.
OrderFigures figures_of(const std::vector<Service>& services, double unit);

// Spearman's rank correlation; equal values share their ranks. 0 when either has no order.
double rank_correlation(const std::vector<double>& a, const std::vector<double>& b);

// A line of SOFTVERBS_TRACE: one quantum.
struct Quantum {
  std::uint64_t ns = 0;
  std::uint32_t qpn = 0;
  std::uint64_t bytes = 0;
  std::uint64_t arrival_ns = 0;
  int to_device = 0;
};
// From line `skip` on. Throws Failure.
std::vector<Quantum> read_trace(const std::string& path, std::size_t skip);
std::size_t count_lines(const std::string& path);

}  // namespace verbatim::perf::qp_order
