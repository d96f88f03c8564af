// What an operator is told of a connection that failed: one line that stands alone. What failed, why as far as it can
// be known here, what to run next, and then the facts. The most important first: NCCL cuts long lines.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <optional>
#include <string>

#include "base/result.h"
#include "verbs/mr_cache.h"
#include "verbs/port_history.h"

namespace verbatim {

// The memory of a request that its NIC may not touch.
struct RefusedBuffer {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  std::optional<MrRegion> region;  // that it is in
};

// What a work request was for, by our own records: a completion that reports a failure tells nothing of it.
struct FailedWork {
  const char* operation_text = "";     // "sending"
  std::optional<std::uint64_t> bytes;  // of payload
  bool loopback = false;               // from the device to itself
  std::optional<RefusedBuffer> buffer = std::nullopt;
};

// How far a connection had come.
struct CompletedCounts {
  std::uint64_t messages = 0;  // that are known to be over
  std::uint64_t bytes = 0;
  bool peer_responded = false;  // anything has come from the peer's NIC, or been acknowledged by it
};

struct PathEnd {
  std::string host;
  std::string device;  // the verbs device, "mlx5_0"
  unsigned port = 1;
  unsigned gid_index = 0;
  ibv_gid gid = {};
  std::uint32_t qp = 0;
  ibv_mtu mtu = IBV_MTU_256;  // of the port
};

// One queue pair's connection at the moment of its failure.
struct PathFacts {
  PathEnd local;
  std::optional<PathEnd> remote;  // once it is known
  bool roce = true;
  bool peer_disconnected = false;  // the side channel said so before
  std::optional<RefusedBuffer> buffer;
  std::string peer_report;  // what it said of the connection's end
  ibv_mtu mtu = IBV_MTU_256;
  unsigned traffic_class = 0;
  unsigned service_level = 0;
  unsigned timeout = 0;  // 4.096 us * 2^timeout
  unsigned retries = 0;
  std::uint64_t age_ns = 0;  // 0: it does not stand yet
  CompletedCounts completed_counts;
  LinkRecord link;  // of the local port, since the connection was made
  ibv_port_state port_state = IBV_PORT_ACTIVE;
  int port_errno = 0;        // of asking for that state
  bool gid_removed = false;  // the device has no longer, at its index, the GID that the connection was made with
  std::string counters;      // that have grown since then
};

struct Diagnosis {
  std::string cause;
  std::string next;  // what to do or run
};

// "IBV_WC_RETRY_EXC_ERR"
const char* wc_status_name(ibv_wc_status status);
const char* event_name(ibv_event_type type);

// "3 h 2 min", "4.29 s", "12 ms".
std::string to_duration(std::uint64_t ns);

// What a failed completion means.
Diagnosis diagnose(ibv_wc_status status, const PathFacts& facts);
// What an event that ends a queue pair, a completion queue or a device means.
Diagnosis diagnose(ibv_event_type type, const PathFacts& facts);

// The same for what no completion and no event tells of.
Diagnosis diagnose_size_mismatch(const PathFacts& facts);  // the applications of both ends call for different sizes
Diagnosis diagnose_corrupt_peer(const PathFacts& facts);   // the peer did what no peer of this version does
Diagnosis diagnose_contradicting_calls(
    const PathFacts& facts);  // this end's application does what the interface rules out

// "sending 64 bytes failed with transport retry counter exceeded (IBV_WC_RETRY_EXC_ERR 12, vendor error 129)".
// `flushed`: work requests that ended with it. `status_text` is the library's.
std::string describe_completion(const ibv_wc& completion, const char* status_text, const FailedWork& work,
                                std::uint64_t flushed);

// Ends the part of the line that others than this host's operator can use.
inline constexpr const char* kNextStep = ". Next: ";

// The line.
std::string describe_failure(const std::string& what, const Diagnosis& diagnosis, const PathFacts& facts);

// The queue pairs that a device takes of all processes, 0 when not known, and those that this process has on it.
struct QpUsage {
  int limit = 0;
  std::size_t in_use = 0;
};

// What making a connection fails with, beside the error itself: ": why. Next: what to do. Path: ..."; empty when the
// error says all. `facts` may be nullptr.
std::string explain_setup_error(const Error& error, const PathFacts* facts, const QpUsage& usage = {});

// The same for a handshake that ended by what `peer`, "node2 (pid 4711)", did or did not do.
// `unanswered`: nothing came from it at all.
std::string explain_handshake_error(const Error& error, const std::string& peer, bool no_reply = false);

// Without what happened over time: "node1 mlx5_0:1 GID 3 ::ffff:10.0.0.1 QP 4711 to node2 ..., MTU 4096, TC 0, SL 0".
std::string describe_path(const PathFacts& facts);

// The commands that try a path without us, both ends named.
std::string perftest_commands(const PathFacts& facts);

}  // namespace verbatim
