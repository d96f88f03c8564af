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

// One value on its way into a Config.
struct SettingValue {
  std::string text;
  const char* variable;  // the one that was set
};

struct Row {
  Variable shown;
  bool (*assign)(Config& config, const SettingValue& given);  // false: not what `allowed` says
};

// Bases as C has them, like NCCL: 10, 0x0a, 012.
std::optional<std::int64_t> parse_number(const std::string& text) {
  errno = 0;
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 0);
  if (end == text.c_str() || *end != '\0' || errno == ERANGE) return std::nullopt;
  return value;
}

// The type a member takes its number as; that of the content for an optional.
template <typename T>
struct NumberOf {
  using Type = T;
};
template <typename T>
struct NumberOf<std::optional<T>> {
  using Type = T;
};

constexpr std::int64_t kNoNumber = std::numeric_limits<std::int64_t>::min();

// A number from kLow to kHigh. kUnset, where NCCL has such a value, leaves the default.
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
  if (given.text == "auto" || given.text == "-1" || given.text == "-2") {  // NCCL's words for "not decided here"
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
  constexpr std::pair<std::string_view, Completion> kWords[] = {
      {"auto", Completion::kAuto}, {"imm", Completion::kImmediate}, {"atomic", Completion::kAtomic}};
  const auto* const word =
      std::find_if(std::begin(kWords), std::end(kWords), [&](const auto& known) { return known.first == given.text; });
  if (word == std::end(kWords)) return false;
  config.completion = word->second;
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

constexpr std::int64_t kMaxGidIndex = 255;  // a byte in ibv_global_route

// "auto" and NCCL's -1 leave `index` empty; false when malformed.
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

// NCCL documents the same bound.
constexpr std::int64_t kMaxQpsPerConnection = 128;
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

// "4", or "1-8", which NCCL's variable does not know.
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

// Made anew for each init: a static table would be destroyed at exit while threads may still be running.
std::vector<Row> rows() {
  return {
      {{"VERBATIM_VERBS_LIBRARY", "NCCL_IBVERBS_LIB", "path or soname", "`libibverbs.so.1`, then `libibverbs.so`",
        "The verbs library to open."},
       assign_path<&Config::verbs_library>},
      {{"VERBATIM_MLX5_LIBRARY", nullptr, "path or soname", "`libmlx5.so.1`, then `libmlx5.so`",
        "The mlx5 library to open; the plugin works without one."},
       assign_path<&Config::mlx5_library>},
      {{"VERBATIM_HCA", "NCCL_IB_HCA", "`[^][=]name[:port[:rail[:plane]]],...`", "every active port",
        "Devices and ports to use: names by prefix, after `=` exactly, after `^` all but these."},
       assign_text<&Config::hca>},
      number_row<&Config::max_recvs, 1, 8>("VERBATIM_MAX_RECVS", nullptr, "8",
                                           "Receives that NCCL may group into one request."),
      {{"VERBATIM_GID_INDEX", "NCCL_IB_GID_INDEX", "0 to 255, `auto` or -1, or `device=index,...`", "auto",
        "Entry of the GID table. Automatic: RoCE v2 over v1, IPv4 over global IPv6 over link-local."},
       assign_gid_index},
      number_row<&Config::traffic_class, 0, 255, -1>(
          "VERBATIM_TC", "NCCL_IB_TC", "the communicator's, else 0",
          "Traffic class of RoCE packets and of InfiniBand packets with a GRH (DSCP * 4)."),
      number_row<&Config::service_level, 0, 15, -1>("VERBATIM_SL", "NCCL_IB_SL", "0", "InfiniBand service level."),
      number_row<&Config::pkey_index, 0, 65535>("VERBATIM_PKEY", "NCCL_IB_PKEY", "0", "Index into the P_Key table."),
      number_row<&Config::timeout, 1, 31>("VERBATIM_TIMEOUT", "NCCL_IB_TIMEOUT", "20",
                                          "Acknowledgement timeout of a QP: 4.096 us * 2^value."),
      number_row<&Config::retry_count, 0, 7>("VERBATIM_RETRY_CNT", "NCCL_IB_RETRY_CNT", "7",
                                             "Timeouts before a QP gives up."),
      {{"VERBATIM_RELAXED_ORDERING", "NCCL_IB_PCI_RELAXED_ORDERING", "0 off, 1 on, 2 on where the library can", "2",
        "PCIe relaxed ordering for data buffers."},
       assign_relaxed_ordering},
      {{"VERBATIM_ADAPTIVE_ROUTING", "NCCL_IB_ADAPTIVE_ROUTING", "0, 1, or `auto` (also -1, -2)", "auto",
        "The fabric reorders packets: large messages end with a write of their own. Automatic: on for InfiniBand, off "
        "for RoCE."},
       assign_switch<&Config::adaptive_routing>},
      number_row<&Config::adaptive_routing_threshold, 0, kMaxThresholdBytes, -2>(
          "VERBATIM_AR_THRESHOLD", "NCCL_IB_AR_THRESHOLD", "8192",
          "Bytes above which a message counts as large under adaptive routing."),
      {{"VERBATIM_COMPLETION", nullptr, "`imm`, `atomic` or `auto`", "auto",
        "How a receiver hears of its data: by an immediate, or by an atomic on a word that it polls, where both ends "
        "ask for it and can. Automatic: `imm`."},
       assign_completion},
      {{"VERBATIM_QPS_PER_CONNECTION", "NCCL_IB_QPS_PER_CONNECTION", "1 to 128; ours also a range, `1-8`", "1",
        "Queue pairs of a connection, per device. A range: the fewer, the more connections NCCL announces."},
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
        "File to which a line is appended for each queue pair of each connection."},
       assign_path<&Config::qp_dump>},
      {{"VERBATIM_SPLIT_DATA_ON_QPS", "NCCL_IB_SPLIT_DATA_ON_QPS", "0, 1, or `auto` (also -1, -2)", "auto",
        "Whether one message is spread over the queue pairs of its connection. Automatic: when it is large enough."},
       assign_switch<&Config::split_data_on_qps>},
      {{"VERBATIM_ECE", "NCCL_IB_ECE_ENABLE", "0 or 1", "1",
        "Exchange enhanced connection establishment options where the device has them."},
       assign_ece},
      {{"VERBATIM_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "`[^][=]name,...`", "InfiniBand, else Ethernet, else loopback",
        "Interface of the TCP side channel: names by prefix, after `=` exactly, after `^` all but these."},
       assign_text<&Config::socket_ifname>},
      {{"VERBATIM_SOCKET_FAMILY", "NCCL_SOCKET_FAMILY", "`AF_INET` or `AF_INET6`", "either, IPv4 first",
        "Address family of the TCP side channel."},
       assign_socket_family},
      number_row<&Config::connect_timeout_s, 1, kMaxConnectTimeoutS>(
          "VERBATIM_CONNECT_TIMEOUT_S", nullptr, "60", "Seconds until a connection that does not come about fails."),
      number_row<&Config::close_timeout_ms, 0, kMaxCloseTimeoutMs>(
          "VERBATIM_CLOSE_TIMEOUT_MS", nullptr, "5000",
          "Milliseconds that a closed connection's queue pairs stay alive for a peer that has not closed its end."),
      number_row<&Config::keepalive_s, 0, kMaxMonitorTimeoutS>(
          "VERBATIM_KEEPALIVE_S", nullptr, "300",
          "Seconds without a sign of life from a peer, process or host, after which its connections fail; 0: never."),
      number_row<&Config::stall_warn_s, 0, kMaxMonitorTimeoutS>(
          "VERBATIM_STALL_WARN_S", nullptr, "30",
          "Seconds without progress, with something outstanding, after which a connection is reported with who holds "
          "it up; 0: never."),
      number_row<&Config::stall_fail_s, 0, kMaxMonitorTimeoutS>(
          "VERBATIM_STALL_FAIL_S", nullptr, "0", "Seconds after which such a connection fails at both ends; 0: never."),
      {{"VERBATIM_STATE_SOCKET", nullptr, "path", "none",
        "UNIX socket where the state of all connections can be read as JSON. `%p` in it becomes the process ID, `%h` "
        "the host's name."},
       assign_path<&Config::state_socket>},
      {{"VERBATIM_STATS", nullptr, "path", "none",
        "File for what each connection has carried, as JSON, written when NCCL finalizes. `%p` in it becomes the "
        "process "
        "ID, `%h` the host's name."},
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
      VERBATIM_WARN("%s=%s is not a valid setting: allowed is %s", variable, value, row.shown.allowed.c_str());
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
