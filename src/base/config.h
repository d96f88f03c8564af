// The settings of the plugin, read from the environment at init. config.cc has one table with a row for each variable:
// name, NCCL's variable of the same meaning, allowed values, default, help. A test compares the list in
// plugin/README.md with variables_markdown().
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"

namespace verbatim {

enum class Switch : std::uint8_t { kAuto, kOff, kOn };

// How the sender signals that a message is complete: by an immediate, or by an atomic on a word that the receiver
// polls.
enum class Completion : std::uint8_t { kAuto, kImmediate, kAtomic };

// How the QPs of a communicator are ordered by number: net/connect/endpoint_pool.h.
enum class QpOrder : std::uint8_t { kStaggered, kNative };

// Which network devices are made of a port whose device has a Data Direct interface: the port without it, one with it,
// or both.
enum class DataDirect : std::uint8_t { kOff, kOnly, kBoth };

struct QpRange {
  unsigned min = 1;
  unsigned max = 1;
};

// VERBATIM_QP_POOL: peers, and QPs to each. 0: as announced.
struct QpPoolSetting {
  unsigned peers = 0;
  unsigned qps = 0;
};

// A text that is parsed elsewhere (HCA filter, interface list). `variable` is the variable that was set, VERBATIM_* or
// NCCL's, for messages of that parser; "" when none was set.
struct TextSetting {
  std::string value;
  const char* variable = "";
};

// Addresses whose first `bits` bits are those of `prefix`; IPv4 addresses are IPv4-mapped.
struct AddressRange {
  in6_addr prefix = {};
  unsigned bits = 0;  // 0 to 128

  bool contains(const in6_addr& address) const;
};

// VERBATIM_GID_INDEX: one index for all devices, or one for each named device. For all others, gid.h chooses; what the
// other settings of this struct ask for is preferred.
struct GidSetting {
  std::optional<unsigned> everywhere = {};
  std::vector<std::pair<std::string, unsigned>> per_device = {};
  const char* variable = "";
  unsigned roce_version = 2;
  int family = AF_INET;
  std::optional<AddressRange> range = {};
  unsigned flid_index = 1;  // InfiniBand: used if that entry has an FLID

  std::optional<unsigned> for_device(std::string_view device) const;
};

struct Config {
  std::string verbs_library;        // empty: libibverbs.so.1, then libibverbs.so
  std::string mlx5_library;         // empty: libmlx5.so.1, then libmlx5.so
  TextSetting hca;                  // syntax: verbs/hca_filter.h
  bool merge_nics = true;           // makeVDevice makes devices of several ports
  bool rma = true;                  // the RMA tables work
  bool failover = true;             // a connection of several lanes survives the loss of one
  unsigned lane_timeout_ms = 5000;  // without an acknowledgement on a lane, while another has some; 0: any time
  unsigned reconnect_s = 60;        // how long a connection waits for a lane when none works; 0: it fails
  unsigned max_recvs = 8;
  GidSetting gid;
  std::optional<std::uint8_t> traffic_class;      // unset: the communicator's, else 0
  std::optional<std::uint8_t> cts_traffic_class;  // of the QPs of receive comms; unset: as the others
  std::optional<std::uint8_t> service_level;      // unset: the communicator's traffic class, else 0
  std::uint16_t pkey_index = 0;
  std::uint8_t timeout = 20;  // 4.096 us * 2^timeout
  std::uint8_t retry_count = 7;
  Switch relaxed_ordering = Switch::kAuto;  // libibverbs without support: kOn is an error, kAuto means off
  DataDirect data_direct = DataDirect::kOnly;
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
  bool flush_disabled = false;
  TextSetting socket_ifname;  // syntax: base/socket_interface.h
  int socket_family = 0;      // AF_UNSPEC, AF_INET or AF_INET6
  std::string psk_file;       // path; empty: none
  unsigned connect_timeout_s = 60;
  unsigned keepalive_s = 300;        // half the timeout of PyTorch's watchdog; 0: never
  unsigned stall_warn_s = 30;        // 0: never
  unsigned stall_fail_s = 0;         // 0: never
  std::string state_directory;       // VERBATIM_STATE_DIR, base/state_directory.h; empty: the default one
  std::string state_socket;          // path; empty: none; %p and %h as in stats_file
  bool profiler = false;             // events for NCCL's profiler
  bool latency = false;              // latencies are measured
  std::string stats_file;            // path; empty: none; %p: process ID, %h: host name
  unsigned close_timeout_ms = 5000;  // more than one retransmission at the default timeout

  // Reads all variables. VERBATIM_* takes precedence over NCCL's variable; an empty string counts as not set. A value
  // that is malformed or out of range is logged, and the result is ErrorKind::kUsage. The plugin calls getenv nowhere
  // else.
  static Result<Config> from_environment();

  // The same with another source of values: `lookup` returns nullptr for a variable that is not set.
  static Result<Config> from(const std::function<const char*(const char*)>& lookup);
};

// One row of the table.
struct Variable {
  const char* name;
  const char* alias;          // NCCL's variable, nullptr when there is none
  std::string allowed;        // type and range, for warnings and README
  const char* default_value;  // for README
  const char* help;
};

std::vector<Variable> variables();

// One row of the table with what the environment gives it.
struct Setting {
  Variable shown;
  const char* set_by = nullptr;  // the variable whose value counts, shown.name or shown.alias; nullptr: the default
  std::string value = {};        // empty: the default
  bool valid = true;
  bool alias_ignored = false;  // both variables are set, and NCCL's has no effect
};

// Every row of the table. `config` gets the values that are valid: unlike Config::from_environment, this does not end
// at the first that is not. Logs nothing.
std::vector<Setting> read_settings(const std::function<const char*(const char*)>& lookup, Config& config);
std::vector<Setting> read_settings(Config& config);  // of the environment

// Variables that are set and have no effect.
struct UnusedVariables {
  struct Unknown {
    std::string name;
    const char* nearest;  // the setting with the most similar name
  };
  std::vector<std::string> of_nccl;  // that NCCL's InfiniBand transport reads
  std::vector<Unknown> unknown;      // VERBATIM_ variables that do not exist
};

// `environment`: "NAME=VALUE", nullptr at the end.
UnusedVariables find_unused_variables(const char* const* environment);

// Logs which variables in `environment` have no effect: those of NCCL's InfiniBand transport in one INFO line, each
// unknown VERBATIM_ variable in a warning with the nearest known name. Also warns of MLX5_SINGLE_THREADED=1, which is
// harmful, and of an NCCL_IB_DISABLE that is not 0, which the plugin does not obey.
void log_unused_variables(const char* const* environment);

// The table in plugin/README.md: a header row, a separator row and one row for each variable, each with a newline at
// its end.
std::string variables_markdown();

}  // namespace verbatim
