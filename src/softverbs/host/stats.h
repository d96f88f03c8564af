// Reads the counters of a segment and formats them as JSON. The owning process does so when it ends; the control
// program does so for any running process.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "softverbs/host/counters.h"
#include "softverbs/host/layout.h"

namespace verbatim::softverbs {

struct WorkStats {
  std::array<std::uint64_t, kSendOpcodeNames.size()> sends{};
  std::uint64_t receives = 0;
  std::uint64_t posts = 0;          // calls of ibv_post_send
  std::uint64_t completes = 0;      // calls of ibv_wr_complete
  std::uint64_t receive_posts = 0;  // calls of ibv_post_recv
  std::uint64_t bytes = 0;          // of posted send requests of all opcodes
  std::uint64_t inline_bytes = 0;
  std::uint64_t completions = 0;

  // Calls that ring a doorbell on a hardware device.
  std::uint64_t doorbells() const { return posts + completes + receive_posts; }
  std::uint64_t send_requests() const;
};

struct QpStats {
  std::uint32_t qpn = 0;
  std::uint32_t device = 0;
  std::uint32_t dest_qpn = 0;
  std::optional<std::uint32_t> path;  // of the fabric, since the QP has an address
  std::uint32_t udp_source_port = 0;  // 0: its packets have none
  ibv_qp_type type = IBV_QPT_RC;
  ibv_qp_state state = IBV_QPS_RESET;
  bool is_alive = true;
  WorkStats work;
  std::uint64_t modifies = 0;
  std::uint64_t queries = 0;
};

struct ObjectStats {
  std::uint64_t created = 0;
  std::uint64_t alive = 0;
};

struct ProcessStats {
  pid_t pid = 0;
  std::string program;
  std::array<std::uint64_t, kVerbNames.size()> calls{};
  WorkStats work;  // of all QPs, including destroyed ones, and of the SRQs
  std::uint64_t srq_posts = 0;
  std::uint64_t polls = 0;
  std::uint64_t empty_polls = 0;
  std::array<ObjectStats, kObjectNames.size()> objects;
  std::vector<QpStats> qps;
  std::vector<std::uint64_t> engine_requests;  // executed send requests of each thread of the `thread` engine

  ObjectStats& of(ObjectKind kind) { return objects[static_cast<std::size_t>(kind)]; }
  const ObjectStats& of(ObjectKind kind) const { return objects[static_cast<std::size_t>(kind)]; }
  std::uint64_t doorbells() const { return work.doorbells() + srq_posts; }
  std::uint64_t total_calls() const;
};

// While the process runs, the numbers of one reading may differ slightly from each other.
ProcessStats read_stats(const Segment& segment);
QpStats read_qp_stats(const Segment& segment, std::uint32_t index);

const char* type_name(ibv_qp_type type);
const char* state_name(ibv_qp_state state);

// `schema` in the JSON: incremented when the meaning of a key changes or a key is removed.
constexpr std::uint64_t kStatsSchema = 1;

// One JSON object, indented by two spaces a level.
std::string to_json(const ProcessStats& stats);

// The pattern with every %p replaced by the pid.
std::string stats_file_name(const std::string& pattern, pid_t pid);

}  // namespace verbatim::softverbs
