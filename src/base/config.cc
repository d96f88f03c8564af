#include "base/config.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <type_traits>

#include "base/log.h"

namespace verbatim {
namespace {

// The value of one variable of the environment.
struct SettingValue {
  std::string text;
  const char* variable;  // the variable that was set: VERBATIM_* or NCCL's
};

struct Row {
  Variable shown;
  bool (*assign)(Config& config, const SettingValue& given);  // false: `given` is not an allowed value
};

// Decimal, hexadecimal and octal as in C (10, 0x0a, 012), because NCCL reads its variables in the same way.
std::optional<std::int64_t> parse_number(const std::string& text) {
  errno = 0;
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 0);
  if (end == text.c_str() || *end != '\0' || errno == ERANGE) return std::nullopt;
  return value;
}

// The number type of a data member: for std::optional<T> it is T.
template <typename T>
struct NumberOf {
  using Type = T;
};
template <typename T>
struct NumberOf<std::optional<T>> {
  using Type = T;
};

constexpr std::int64_t kNoNumber = std::numeric_limits<std::int64_t>::min();

// Accepts a number from kLow to kHigh. kUnset (NCCL's number for "not set", where NCCL has one) leaves the default.
template <auto kMember, std::int64_t kLow, std::int64_t kHigh, std::int64_t kUnset = kNoNumber>
bool assign_number(Config& config, const SettingValue& given) {
  using Number = typename NumberOf<std::remove_reference_t<decltype(config.*kMember)>>::Type;
  const std::optional<std::int64_t> number = parse_number(given.text);
  if (!number) return false;
  if (*number == kUnset && kUnset != kNoNumber) return true;
  if (*number < kLow || *number > kHigh) return false;
  config.*kMember = static_cast<Number>(*number);
  return true;
}

template <auto kMember, std::int64_t kLow, std::int64_t kHigh, std::int64_t kUnset = kNoNumber>
Row number_row(const char* name, const char* alias, const char* default_value, const char* help) {
  std::string allowed = std::to_string(kLow) + " to " + std::to_string(kHigh);
  if (kUnset != kNoNumber) allowed += ", " + std::to_string(kUnset) + " for the default";
  return {{name, alias, std::move(allowed), default_value, help}, assign_number<kMember, kLow, kHigh, kUnset>};
}

template <Switch Config::*kMember>
bool assign_switch(Config& config, const SettingValue& given) {
  if (given.text == "auto" || given.text == "-1" || given.text == "-2") {  // -1 and -2 are NCCL's values for auto
    config.*kMember = Switch::kAuto;
  } else if (given.text == "0" || given.text == "1") {
    config.*kMember = given.text == "1" ? Switch::kOn : Switch::kOff;
  } else {
    return false;
  }
  return true;
}

template <std::string Config::*kMember>
bool assign_path(Config& config, const SettingValue& given) {
  config.*kMember = given.text;
  return true;
}

template <TextSetting Config::*kMember>
bool assign_text(Config& config, const SettingValue& given) {
  config.*kMember = {given.text, given.variable};
  return true;
}

bool assign_completion(Config& config, const SettingValue& given) {
  constexpr std::pair<std::string_view, Completion> kValues[] = {
      {"auto", Completion::kAuto}, {"imm", Completion::kImmediate}, {"atomic", Completion::kAtomic}};
  const auto* const value = std::find_if(std::begin(kValues), std::end(kValues),
                                         [&](const auto& known) { return known.first == given.text; });
  if (value == std::end(kValues)) return false;
  config.completion = value->second;
  return true;
}

bool assign_relaxed_ordering(Config& config, const SettingValue& given) {
  constexpr Switch kMeaning[] = {Switch::kOff, Switch::kOn, Switch::kAuto};
  const std::optional<std::int64_t> number = parse_number(given.text);
  if (!number || *number < 0 || *number > 2) return false;
  config.relaxed_ordering = kMeaning[*number];
  return true;
}

bool assign_ece(Config& config, const SettingValue& given) {
  if (given.text != "0" && given.text != "1") return false;
  config.ece = given.text == "1";
  return true;
}

bool assign_socket_family(Config& config, const SettingValue& given) {
  if (given.text == "AF_INET") {
    config.socket_family = AF_INET;
  } else if (given.text == "AF_INET6") {
    config.socket_family = AF_INET6;
  } else {
    return false;
  }
  return true;
}

constexpr std::int64_t kMaxGidIndex = 255;  // ibv_global_route::sgid_index has 8 bits

// "auto" and NCCL's -1 leave `index` empty. False: `text` is malformed.
bool parse_gid_index(const std::string& text, std::optional<unsigned>& index) {
  index.reset();
  if (text == "auto") return true;
  const std::optional<std::int64_t> number = parse_number(text);
  if (!number || *number < -1 || *number > kMaxGidIndex) return false;
  if (*number >= 0) index = static_cast<unsigned>(*number);
  return true;
}

bool assign_gid_index(Config& config, const SettingValue& given) {
  GidIndexSetting setting{.everywhere = {}, .per_device = {}, .variable = given.variable};
  if (given.text.find('=') == std::string::npos) {
    if (!parse_gid_index(given.text, setting.everywhere)) return false;
    config.gid_index = setting;
    return true;
  }
  for (std::size_t begin = 0; begin <= given.text.size();) {
    const std::size_t end = std::min(given.text.find(',', begin), given.text.size());
    const std::string item = given.text.substr(begin, end - begin);
    const std::size_t equals = item.find('=');
    std::optional<unsigned> index;
    if (equals == std::string::npos || equals == 0 || !parse_gid_index(item.substr(equals + 1), index)) return false;
    if (index) setting.per_device.emplace_back(item.substr(0, equals), *index);
    begin = end + 1;
  }
  config.gid_index = setting;
  return true;
}

constexpr std::int64_t kMaxQpsPerConnection = 128;  // as NCCL documents for NCCL_IB_QPS_PER_CONNECTION
constexpr std::int64_t kMaxPoolPeers = 65536;
constexpr std::int64_t kMaxPoolQps = 4096;
constexpr std::int64_t kMaxGatherUs = 2000;
constexpr std::int64_t kMaxThresholdBytes = std::int64_t{1} << 40;
constexpr std::int64_t kMaxConnectTimeoutS = 3600;
constexpr std::int64_t kMaxCloseTimeoutMs = 600'000;
constexpr std::int64_t kMaxMonitorTimeoutS = 86'400;

std::optional<unsigned> parse_count(const std::string& text, std::int64_t max) {
  const std::optional<std::int64_t> number = parse_number(text);
  if (!number || *number < 1 || *number > max) return std::nullopt;
  return static_cast<unsigned>(*number);
}

// "4", or a range "1-8". NCCL's variable has no ranges, so a range is refused there.
bool assign_qps_per_connection(Config& config, const SettingValue& given) {
  const std::size_t dash = given.text.find('-', 1);
  const std::optional<unsigned> min = parse_count(given.text.substr(0, dash), kMaxQpsPerConnection);
  if (!min) return false;
  config.qps_per_connection = {*min, *min};
  if (dash == std::string::npos) return true;
  const std::optional<unsigned> max = parse_count(given.text.substr(dash + 1), kMaxQpsPerConnection);
  if (!max || *max < *min || given.variable != std::string_view("VERBATIM_QPS_PER_CONNECTION")) return false;
  config.qps_per_connection.max = *max;
  return true;
}

bool assign_qp_order(Config& config, const SettingValue& given) {
  if (given.text != "staggered" && given.text != "native") return false;
  config.qp_order = given.text == "native" ? QpOrder::kNative : QpOrder::kStaggered;
  return true;
}

bool assign_qp_pool(Config& config, const SettingValue& given) {
  const std::size_t cross = given.text.find('x', 1);
  if (cross == std::string::npos) return false;
  const std::optional<unsigned> peers = parse_count(given.text.substr(0, cross), kMaxPoolPeers);
  const std::optional<unsigned> qps = parse_count(given.text.substr(cross + 1), kMaxPoolQps);
  if (!peers || !qps) return false;
  config.qp_pool = {*peers, *qps};
  return true;
}

// Built by each call: a static table would be destroyed at exit, when other threads may still read it.
std::vector<Row> rows() {
  return {
      {{"VERBATIM_VERBS_LIBRARY", "NCCL_IBVERBS_LIB", "path or soname", "`libibverbs.so.1`, then `libibverbs.so`",
        "The libibverbs to open."},
       assign_path<&Config::verbs_library>},
      {{"VERBATIM_MLX5_LIBRARY", nullptr, "path or soname", "`libmlx5.so.1`, then `libmlx5.so`",
        "The libmlx5 to open. The plugin works without libmlx5."},
       assign_path<&Config::mlx5_library>},
      {{"VERBATIM_HCA", "NCCL_IB_HCA", "`[^][=]name[:port[:rail[:plane]]],...`", "every active port",
        "Devices and ports to use: prefixes of names, or exact names after `=`. `^` before the list excludes them."},
       assign_text<&Config::hca>},
      number_row<&Config::max_recvs, 1, 8>("VERBATIM_MAX_RECVS", nullptr, "8",
                                           "Receives that NCCL may group into one irecv."),
      {{"VERBATIM_GID_INDEX", "NCCL_IB_GID_INDEX", "0 to 255, `auto` or -1, or `device=index,...`", "auto",
        "Index into the GID table (RoCE). Automatic: v2 before v1, then IPv4 before global IPv6 before link-local."},
       assign_gid_index},
      number_row<&Config::traffic_class, 0, 255, -1>(
          "VERBATIM_TC", "NCCL_IB_TC", "the communicator's, else 0",
          "Traffic class of RoCE packets and of InfiniBand packets with a GRH (DSCP * 4)."),
      number_row<&Config::service_level, 0, 15, -1>("VERBATIM_SL", "NCCL_IB_SL", "0", "InfiniBand service level."),
      number_row<&Config::pkey_index, 0, 65535>("VERBATIM_PKEY", "NCCL_IB_PKEY", "0", "Index into the P_Key table."),
      number_row<&Config::timeout, 1, 31>("VERBATIM_TIMEOUT", "NCCL_IB_TIMEOUT", "20",
                                          "Acknowledgement timeout of a QP: 4.096 us * 2^value."),
      number_row<&Config::retry_count, 0, 7>("VERBATIM_RETRY_CNT", "NCCL_IB_RETRY_CNT", "7",
                                             "Retransmissions after a timeout before a QP fails."),
      {{"VERBATIM_RELAXED_ORDERING", "NCCL_IB_PCI_RELAXED_ORDERING", "0 off, 1 on, 2 on if libibverbs supports it", "2",
        "PCIe relaxed ordering for data buffers."},
       assign_relaxed_ordering},
      {{"VERBATIM_ADAPTIVE_ROUTING", "NCCL_IB_ADAPTIVE_ROUTING", "0, 1, or `auto` (also -1, -2)", "auto",
        "Whether the network may reorder packets. If on, the completion of a large message is signalled by a separate "
        "write after the data. Automatic: on for InfiniBand, off for RoCE."},
       assign_switch<&Config::adaptive_routing>},
      number_row<&Config::adaptive_routing_threshold, 0, kMaxThresholdBytes, -2>(
          "VERBATIM_AR_THRESHOLD", "NCCL_IB_AR_THRESHOLD", "8192",
          "With adaptive routing: a message of more bytes than this is large."),
      {{"VERBATIM_COMPLETION", nullptr, "`imm`, `atomic` or `auto`", "auto",
        "How the sender signals a completed message: by an immediate, or by an atomic on a word that the receiver "
        "polls. `atomic` is used only if both ends set and support it. Automatic: `imm`."},
       assign_completion},
      {{"VERBATIM_QPS_PER_CONNECTION", "NCCL_IB_QPS_PER_CONNECTION",
        "1 to 128, or a range `1-8` (not for NCCL's variable)", "1",
        "Queue pairs of a connection on each device. With a range: fewer if NCCL announces more connections."},
       assign_qps_per_connection},
      {{"VERBATIM_QP_ORDER", nullptr, "`staggered` (replaces `pool`, `gather`, `ring`) or `native`", "staggered",
        "Order of the queue pairs by number: see [QP order](#qp-order)."},
       assign_qp_order},
      {{"VERBATIM_QP_POOL", nullptr, "`PxQ`: 1 to 65536 peers, 1 to 4096 queue pairs to each", "as NCCL announces",
        "Connections whose queue pairs are created in advance. Before table version 11 NCCL announces none."},
       assign_qp_pool},
      number_row<&Config::qp_gather_us, 0, kMaxGatherUs>(
          "VERBATIM_QP_GATHER_US", nullptr, "300",
          "Microseconds without a connection request after which a burst of requests ends and its queue pairs are "
          "created."),
      {{"VERBATIM_QP_DUMP", nullptr, "path; `%p` is the process id", "none",
        "File to which the plugin appends one line for each queue pair of each connection."},
       assign_path<&Config::qp_dump>},
      {{"VERBATIM_SPLIT_DATA_ON_QPS", "NCCL_IB_SPLIT_DATA_ON_QPS", "0, 1, or `auto` (also -1, -2)", "auto",
        "Whether a message is split over the queue pairs of its connection. Automatic: if it is large."},
       assign_switch<&Config::split_data_on_qps>},
      {{"VERBATIM_ECE", "NCCL_IB_ECE_ENABLE", "0 or 1", "1",
        "Exchange enhanced connection establishment (ECE) options if the device supports them."},
       assign_ece},
      {{"VERBATIM_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "`[^][=]name,...`", "InfiniBand, else Ethernet, else loopback",
        "Interface of the TCP side channel: prefixes of names, or exact names after `=`. `^` before the list excludes "
        "them."},
       assign_text<&Config::socket_ifname>},
      {{"VERBATIM_SOCKET_FAMILY", "NCCL_SOCKET_FAMILY", "`AF_INET` or `AF_INET6`", "either, IPv4 first",
        "Address family of the TCP side channel."},
       assign_socket_family},
      number_row<&Config::connect_timeout_s, 1, kMaxConnectTimeoutS>(
          "VERBATIM_CONNECT_TIMEOUT_S", nullptr, "60", "Seconds until a connection that is not established fails."),
      number_row<&Config::close_timeout_ms, 0, kMaxCloseTimeoutMs>(
          "VERBATIM_CLOSE_TIMEOUT_MS", nullptr, "5000",
          "Milliseconds that the queue pairs of a closed connection are kept for a peer that has not closed yet."),
      number_row<&Config::keepalive_s, 0, kMaxMonitorTimeoutS>(
          "VERBATIM_KEEPALIVE_S", nullptr, "300",
          "Seconds without a message from the peer process after which its connections fail; 0: never."),
      number_row<&Config::stall_warn_s, 0, kMaxMonitorTimeoutS>(
          "VERBATIM_STALL_WARN_S", nullptr, "30",
          "Seconds without progress, with operations outstanding, after which a warning reports the connection and the "
          "cause of the stall; 0: never."),
      number_row<&Config::stall_fail_s, 0, kMaxMonitorTimeoutS>(
          "VERBATIM_STALL_FAIL_S", nullptr, "0", "Seconds until a stalled connection fails at both ends; 0: never."),
      {{"VERBATIM_STATE_SOCKET", nullptr, "path", "none",
        "UNIX socket from which the state of all connections can be read as JSON. `%p` is replaced by the process ID, "
        "`%h` by the host name."},
       assign_path<&Config::state_socket>},
      {{"VERBATIM_STATS", nullptr, "path", "none",
        "File for the statistics of each connection as JSON, written when NCCL calls finalize. `%p` is replaced by the "
        "process ID, `%h` by the host name."},
       assign_path<&Config::stats_file>},
  };
}

}  // namespace

std::optional<unsigned> GidIndexSetting::for_device(std::string_view device) const {
  for (const auto& [name, index] : per_device) {
    if (name == device) return index;
  }
  return everywhere;
}

Result<Config> Config::from(const std::function<const char*(const char*)>& lookup) {
  const auto set = [&](const char* variable) {
    const char* value = variable != nullptr ? lookup(variable) : nullptr;
    return value != nullptr && *value != '\0' ? value : nullptr;
  };
  Config config;
  for (const Row& row : rows()) {
    const char* variable = set(row.shown.name) != nullptr ? row.shown.name : row.shown.alias;
    const char* value = set(variable);
    if (value == nullptr) continue;
    if (!row.assign(config, {value, variable})) {
      VERBATIM_WARN("%s=%s is not valid. Next: set %s", variable, value, row.shown.allowed.c_str());
      return Error{ErrorKind::kUsage, EINVAL, "environment"};
    }
  }
  return config;
}

Result<Config> Config::from_environment() {
  return from([](const char* name) -> const char* { return std::getenv(name); });
}

std::vector<Variable> variables() {
  std::vector<Variable> shown;
  for (const Row& row : rows()) shown.push_back(row.shown);
  return shown;
}

std::string variables_markdown() {
  std::string table =
      "| variable | NCCL's variable | values | default | meaning |\n"
      "|---|---|---|---|---|\n";
  const auto code = [](const char* name) { return std::string("`").append(name).append("`"); };
  for (const Variable& row : variables()) {
    const std::string alias = row.alias != nullptr ? code(row.alias) : "-";
    for (const std::string& cell : {code(row.name), alias, row.allowed, std::string(row.default_value)}) {
      table.append("| ").append(cell).append(" ");
    }
    table.append("| ").append(row.help).append(" |\n");
  }
  return table;
}

}  // namespace verbatim
