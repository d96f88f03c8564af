// The settings of the plugin, read from the environment once, at init. Every variable is one row of one table: its
// name, NCCL's variable of the same meaning, the values allowed, default and help. README's list is
// variables_markdown().
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"

namespace verbatim {

enum class Switch : std::uint8_t { kAuto, kOff, kOn };

// How a receiver hears that data has arrived: by an immediate, or by an atomic on a word that it polls.
enum class Completion : std::uint8_t { kAuto, kImmediate, kAtomic };

// How the QPs of a communicator are ordered by number: net/connect/endpoint_pool.h.
enum class QpOrder : std::uint8_t { kStaggered, kNative };

struct QpRange {
  unsigned min = 1;
  unsigned max = 1;
};

// VERBATIM_QP_POOL: peers, and QPs to each. 0: as announced.
struct QpPoolSetting {
  unsigned peers = 0;
  unsigned qps = 0;
};

// A text whose inner syntax its user parses (HCA filter, interface list). `variable` is the one that was set, ours or
// NCCL's, so that a later message can name it; "" when neither was.
struct TextSetting {
  std::string value;
  const char* variable = "";
};

// VERBATIM_GID_INDEX: one index for all devices, or one per named device; anything not named is chosen automatically.
struct GidIndexSetting {
  std::optional<unsigned> everywhere = {};
  std::vector<std::pair<std::string, unsigned>> per_device = {};
  const char* variable = "";

  std::optional<unsigned> for_device(std::string_view device) const;
};

struct Config {
  std::string verbs_library;  // empty: libibverbs.so.1, then libibverbs.so
  std::string mlx5_library;   // empty: libmlx5.so.1, then libmlx5.so
  TextSetting hca;            // syntax: verbs/hca_filter.h
  unsigned max_recvs = 8;
  GidIndexSetting gid_index;
  std::optional<std::uint8_t> traffic_class;  // unset: the communicator's, else 0
  std::optional<std::uint8_t> service_level;  // unset: 0
  std::uint16_t pkey_index = 0;
  std::uint8_t timeout = 20;  // 4.096 us * 2^timeout
  std::uint8_t retry_count = 7;
  Switch relaxed_ordering = Switch::kAuto;          // kOn fails where libibverbs cannot, kAuto does without
  Switch adaptive_routing = Switch::kAuto;          // kAuto: on for InfiniBand, off for RoCE
  std::uint64_t adaptive_routing_threshold = 8192;  // bytes
  Completion completion = Completion::kAuto;        // kAuto: kImmediate
  QpRange qps_per_connection;
  QpOrder qp_order = QpOrder::kStaggered;
  QpPoolSetting qp_pool;
  unsigned qp_gather_us = 300;               // without a request, after which a burst of them ends
  std::string qp_dump;                       // file; empty: none
  Switch split_data_on_qps = Switch::kAuto;  // kAuto: by message size
  bool ece = true;
  TextSetting socket_ifname;  // syntax: base/socket_interface.h
  int socket_family = 0;      // AF_UNSPEC, AF_INET or AF_INET6
  unsigned connect_timeout_s = 60;
  unsigned keepalive_s = 300;        // half of the time after which PyTorch's watchdog ends a process; 0: never
  unsigned stall_warn_s = 30;        // 0: never
  unsigned stall_fail_s = 0;         // 0: never
  std::string state_socket;          // path; empty: none; %p and %h as in stats_file
  std::string stats_file;            // empty: none; %p stands for the process, %h for the host
  unsigned close_timeout_ms = 5000;  // more than one retransmission at the default timeout

  // Reads all variables; ours wins over NCCL's, an empty string counts as unset. A value that is malformed or out of
  // range is logged (variable, value, what is allowed) and answered with ErrorKind::kUsage. The only getenv of the
  // plugin.
  static Result<Config> from_environment();

  // The same from any source; `lookup` answers nullptr for "not set".
  static Result<Config> from(const std::function<const char*(const char*)>& lookup);
};

// One row of the table.
struct Variable {
  const char* name;
  const char* alias;          // NCCL's variable, nullptr when there is none
  std::string allowed;        // type and range in words, as warnings and README give it
  const char* default_value;  // as README gives it
  const char* help;
};

// The rows in README's order.
std::vector<Variable> variables();

// The table as README shows it: a header row, a rule and one row a variable, each ended by a newline.
std::string variables_markdown();

}  // namespace verbatim
