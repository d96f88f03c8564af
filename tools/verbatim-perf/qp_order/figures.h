// The figures of an order, from what was written down: the plugin's VERBATIM_QP_DUMP, and who was served when.
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
// Throws Failure when the file is not such a dump.
std::vector<DumpedQp> read_dump(const std::string& path);

// Where the send QPs lie by number, against where rotation and interleaving put them.
struct Placement {
  std::size_t qps = 0;
  std::size_t exact = 0;       // at their place
  std::size_t inversions = 0;  // pairs in the wrong order
};
// `ranks` by identity.
Placement place_by_number(const std::vector<DumpedQp>& dump, const std::map<std::string, int>& ranks);

// Something of a sender has been served: by its port (softverbs' clock), or as seen by its completion.
struct Service {
  int from = 0;
  int to = 0;
  std::uint64_t begin = 0;    // when the sender began with it
  std::uint64_t arrival = 0;  // when its last byte was in
  std::uint64_t bytes = 0;
};

struct OrderFigures {
  double first_max = 0;  // until a receiver had the first of a sender, from the first service of all
  double first_mean = 0;
  double jain = 1;  // the least of all senders, when the first of its peers has everything
  int senders = 0;  // to one receiver at the same time
};
// `unit` of time. Services of one quantum each; those of a message of which only the end is known overlap all before.
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
