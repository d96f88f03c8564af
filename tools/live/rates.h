// What happens on this host: the processes with rates between two samples, whom they wait for, and the kernel's
// counters of the ports that they use.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "live/process.h"

namespace verbatim::live {

struct Rates {
  double bytes_s = 0;
  double messages_s = 0;
  double retries_s = 0;  // of the connection's ports: the kernel does not count them by connection
};

// What an operation that is outstanding waits for.
enum class WaitsFor : std::uint8_t { kNothing, kPeer, kNetwork, kDevice };
const char* name_of(WaitsFor waits);
// From the cause of the stall when the process has found it, else from what the connection has outstanding.
WaitsFor find_wait(const Connection& connection);
bool no_lane_works(const Connection& connection);

struct ConnectionView {
  Connection now;
  std::optional<Rates> rates = {};  // nullopt: the first sample
  WaitsFor waits = WaitsFor::kNothing;
  bool stalled = false;
  Latencies latencies = {};  // of what has ended since the sample before; of the first sample: so far
};

struct RmaRates {
  double put_bytes_s = 0, get_bytes_s = 0;
  double puts_s = 0, signals_s = 0, gets_s = 0;
};

struct RmaQueueView {
  RmaQueue now;
  std::optional<RmaRates> rates = {};  // nullopt: the first sample
  bool stalled = false;
};

struct RmaSetView {
  RmaSet now;  // without its queues
  std::vector<RmaQueueView> queues;
};

struct ProcessView {
  Process now;  // without its connections and RMA sets
  std::vector<ConnectionView> connections;
  std::vector<RmaSetView> rma;
  Rates sent, received;  // sums of the connections
};

// What processes wait for, directly or through others, and what itself waits for no process.
struct Culprit {
  std::string host;
  std::int64_t pid = 0;
  std::size_t waiting = 0;          // processes
  WaitsFor what = WaitsFor::kPeer;  // the process itself, or its network or device
  std::string device = {};          // of these, where this host has the process: "mlx5_0:1"
  std::string peer_host = {};       // of a network if there is one other end
  std::optional<std::int64_t> peer_pid = {};
  bool carried_nothing = false;  // no connection of the process has sent or received: it may be setting up others
};

struct PortView {
  std::string port;                               // "mlx5_0:1"
  std::map<std::string, std::uint64_t> counters;  // without those that only count traffic
  std::map<std::string, double> growth_s;         // of those that grow
};

struct View {
  std::vector<ProcessView> processes;
  std::vector<PortView> ports;
  std::vector<Culprit> culprits;
  std::vector<Problem> problems;
};

// Whether the process is late, because nothing has moved for so long although something is outstanding.
constexpr std::uint64_t kDefaultStallMs = 5000;

// Takes samples, and remembers the one before.
class Sampler {
 public:
  struct Options {
    std::vector<std::string> directories;  // empty: default_directories()
    int timeout_ms = 2000;
    std::uint64_t stall_ms = kDefaultStallMs;
    std::string sysfs = "/sys/class/infiniband";
  };
  explicit Sampler(Options options) : options_(std::move(options)) {}

  View sample();

 private:
  struct Before {
    std::uint64_t time_ns = 0;
    std::map<std::uint64_t, Connection> connections;                                   // by number
    std::map<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>, RmaCounts> rma;  // by set, context and peer
  };
  using Counters = std::map<std::string, std::uint64_t>;

  std::vector<PortView> sample_ports(const std::vector<Process>& processes);
  // `before`: nullptr if there is none from which rates can be computed.
  RmaSetView sample_rma(RmaSet set, std::uint64_t time_ns, const Before* before, Before& next) const;

  const Options options_;
  std::map<ProcessId, Before> before_;
  std::map<std::string, Counters> counters_before_;
  std::uint64_t counters_ns_ = 0;
};

// What has been added to the latencies of a connection.
Latencies latencies_since(const Latencies& before, const Latencies& now);

// The ports of "mlx5_0:1+mlx5_1:1".
std::vector<std::string> split_ports(const std::string& device);

// The longest chains of processes that wait for each other end at these, those first for which most wait.
std::vector<Culprit> find_culprits(const std::vector<ProcessView>& processes);

}  // namespace verbatim::live
