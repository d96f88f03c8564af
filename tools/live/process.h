// The processes of this host that use Verbatim, as their state sockets describe them (plugin/STATE.md).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace verbatim::live {

// Of one latency: its buckets in order, the nanoseconds below which their members are, and how many they are.
using LatencyBuckets = std::map<std::uint64_t, std::uint64_t>;
// By name: "isend_to_completion", ... Empty: the process measures none.
using Latencies = std::map<std::string, LatencyBuckets>;

// The duration that this part of the latencies, 0 to 1, does not exceed; a sixteenth more at most. 0: there are none.
std::uint64_t quantile_ns(const LatencyBuckets& buckets, double part);

struct Connection {
  std::uint64_t number = 0;  // unique within its process
  bool sends = false;
  std::string device;  // "mlx5_0:1+mlx5_1:1"
  std::string peer_host;
  std::int64_t peer_pid = 0;
  std::string state;           // "open", "failed", ...
  std::string error;           // empty: it has not failed
  std::string stall_cause;     // empty: the process has reported no stall
  std::uint32_t messages = 0;  // so far, modulo 2^32
  std::uint64_t bytes = 0;     // so far
  std::uint64_t outstanding = 0;
  std::uint64_t flushes = 0;
  std::uint64_t lanes = 0;
  std::uint64_t lanes_down = 0;
  std::uint64_t no_progress_ms = 0;
  bool send_refused = false;
  bool cts_ready = false;
  bool tested = false;       // of a sender: by its application, recently
  Latencies latencies = {};  // so far
};

// What the device has reported as completed, so far. A put with a signal is a put and a signal.
struct RmaCounts {
  std::uint64_t puts = 0, signals = 0, gets = 0, flushes = 0;
  std::uint64_t put_bytes = 0, get_bytes = 0;
};

// The operations of one context with one peer.
struct RmaQueue {
  std::uint64_t context = 0;
  std::uint64_t peer = 0;  // rank
  std::string peer_host;
  RmaCounts completed = {};
  std::uint64_t outstanding = 0;  // operations: a put with a signal is one
  std::uint64_t no_progress_ms = 0;
  bool stalled = false;  // the process has reported it
};

// The contexts of one createContext.
struct RmaSet {
  std::uint64_t number = 0;  // unique within its process
  std::uint64_t rank = 0;
  std::uint64_t ranks = 0;
  std::string device;  // "mlx5_0:1"
  bool failed = false;
  std::string error;  // empty: it has not failed
  std::vector<RmaQueue> queues = {};
};

// Another user can give its socket the same name.
using ProcessId = std::pair<uid_t, std::string>;  // user, name

struct Process {
  std::string name;  // of its socket, "1234-0a1b2c3d": unique for its user on this host
  uid_t user = 0;
  std::string host;
  std::int64_t pid = 0;  // as the process itself sees it
  std::string program;
  std::uint64_t time_ns = 0;  // of the process's clock, when it wrote its state
  std::vector<Connection> connections;
  std::vector<RmaSet> rma;

  ProcessId id() const { return {user, name}; }
};

// A socket whose process runs and could not be read, or a directory that is not used.
struct Problem {
  std::string path;
  std::string why;
};

struct Listing {
  std::vector<Process> processes;  // sorted by name
  std::vector<Problem> problems;
};

// The directories where processes are found: of this user; of every user if this one is root. VERBATIM_STATE_DIR is
// used if it is set. Throws std::runtime_error if it says that there is none.
std::vector<std::string> default_directories();

// Reads the state of every process that has a socket in one of the directories. Sockets of processes that have ended
// are removed if they are this user's. Reading takes no longer than `timeout_ms`. What processes of other users can
// take of this one's time and memory is limited, for each user and for all; the newest processes are not read for that
// reason, and the problems say so.
Listing read_processes(const std::vector<std::string>& directories, int timeout_ms);

// The process that writes this state. Throws std::exception when it is no state that this program knows.
Process parse_process(const std::string& text);

}  // namespace verbatim::live
