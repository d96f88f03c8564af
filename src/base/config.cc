#include "base/config.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <type_traits>
#include <utility>

#include "base/edit_distance.h"
#include "base/log.h"

namespace verbatim {
namespace {

// Stores the value of one variable. False: it is not an allowed value.
using Assign = std::function<bool(Config& config, const TextSetting& given)>;

struct Row {
  // A constructor, because GCC 12 frees members twice if memory runs out within a list of aggregates.
  Row(const char* name, const char* alias, std::string allowed, const char* default_value, const char* help, Assign how)
      : shown{name, alias, std::move(allowed), default_value, help}, assign(std::move(how)) {}

  Variable shown;
  Assign assign;
};

// Decimal, hexadecimal and octal as in C (10, 0x0a, 012), because NCCL reads its variables in the same way.
std::optional<std::int64_t> parse_number(const std::string& text) {
  errno = 0;
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 0);
  if (end == text.c_str() || *end != '\0' || errno == ERANGE) return std::nullopt;
  return value;
}

std::optional<unsigned> parse_count(const std::string& text, std::int64_t max) {
  const std::optional<std::int64_t> number = parse_number(text);
  if (!number || *number < 1 || *number > max) return std::nullopt;
  return static_cast<unsigned>(*number);
}

// Accepts a number from `low` to `high`. `unset` (NCCL's number for "not set", where NCCL has one) leaves the default.
template <typename Member>
Row number_row(const char* name, const char* alias, Member Config::*member, std::int64_t low, std::int64_t high,
               const char* default_value, const char* help, std::optional<std::int64_t> unset = {}) {
  std::string allowed = std::to_string(low) + " to " + std::to_string(high);
  if (unset) allowed += ", " + std::to_string(*unset) + " for the default";
  const auto assign = [=](Config& config, const TextSetting& given) {
    using Number = typename decltype(std::optional(Member{}))::value_type;  // a member can be std::optional<Number>
    const std::optional<std::int64_t> number = parse_number(given.value);
    if (number && number == unset) return true;
    if (!number || *number < low || *number > high) return false;
    config.*member = static_cast<Number>(*number);
    return true;
  };
  return {name, alias, std::move(allowed), default_value, help, assign};
}

// Accepts the texts in `values`, and for a number also its other forms, like 0x1.
template <typename Owner, typename Value>
Assign one_of(Value Owner::*member, std::vector<std::pair<std::string_view, Value>> values) {
  return [=](Config& config, const TextSetting& given) {
    const std::optional<std::int64_t> number = parse_number(given.value);
    const std::string text = number ? std::to_string(*number) : given.value;
    const auto found =
        std::find_if(values.begin(), values.end(), [&](const auto& allowed) { return allowed.first == text; });
    if (found == values.end()) return false;
    if constexpr (std::is_same_v<Owner, GidSetting>) {
      config.gid.*member = found->second;
    } else {
      config.*member = found->second;
    }
    return true;
  };
}

// -1 and -2 are NCCL's values for auto.
Assign switch_value(Switch Config::*member) {
  return one_of(
      member,
      {{"0", Switch::kOff}, {"1", Switch::kOn}, {"auto", Switch::kAuto}, {"-1", Switch::kAuto}, {"-2", Switch::kAuto}});
}

// Accepts every text.
template <typename Text>
Assign any_text(Text Config::*member) {
  return [=](Config& config, const TextSetting& given) {
    if constexpr (std::is_same_v<Text, TextSetting>) {
      config.*member = given;
    } else {
      config.*member = given.value;
    }
    return true;
  };
}

constexpr std::int64_t kMaxGidIndex = 255;  // ibv_global_route::sgid_index has 8 bits

// "auto" and NCCL's -1 leave `index` empty. False: `text` is malformed.
bool parse_gid_index(const std::string& text, std::optional<unsigned>& index) {
  if (text == "auto") return true;
  const std::optional<std::int64_t> number = parse_number(text);
  if (!number || *number < -1 || *number > kMaxGidIndex) return false;
  if (*number >= 0) index = static_cast<unsigned>(*number);
  return true;
}

bool assign_gid_index(Config& config, const TextSetting& given) {
  GidSetting& setting = config.gid;
  setting.variable = given.variable;
  if (given.value.find('=') == std::string::npos) return parse_gid_index(given.value, setting.everywhere);
  for (std::size_t begin = 0; begin <= given.value.size();) {
    const std::size_t end = std::min(given.value.find(',', begin), given.value.size());
    const std::string item = given.value.substr(begin, end - begin);
    const std::size_t equals = item.find('=');
    std::optional<unsigned> index;
    if (equals == std::string::npos || equals == 0 || !parse_gid_index(item.substr(equals + 1), index)) return false;
    if (index) setting.per_device.emplace_back(item.substr(0, equals), *index);
    begin = end + 1;
  }
  return true;
}

bool assign_flid_index(Config& config, const TextSetting& given) {
  const std::optional<std::int64_t> index = parse_number(given.value);
  if (!index || *index < 0 || *index > kMaxGidIndex) return false;
  config.gid.flid_index = static_cast<unsigned>(*index);
  return true;
}

// "10.0.0.0/8", "fd00::/16", or one address.
bool assign_address_range(Config& config, const TextSetting& given) {
  const std::size_t slash = std::min(given.value.find('/'), given.value.size());
  const std::string address = given.value.substr(0, slash);
  AddressRange range;
  unsigned first_bit = 0;
  if (inet_pton(AF_INET6, address.c_str(), &range.prefix) != 1) {
    first_bit = 96;
    range.prefix = {};
    range.prefix.s6_addr[10] = range.prefix.s6_addr[11] = 0xff;
    if (inet_pton(AF_INET, address.c_str(), &range.prefix.s6_addr[12]) != 1) return false;
  }
  range.bits = 128;
  if (slash != given.value.size()) {
    const std::optional<std::int64_t> bits = parse_number(given.value.substr(slash + 1));
    if (!bits || *bits < 0 || *bits > 128 - first_bit) return false;
    range.bits = first_bit + static_cast<unsigned>(*bits);
  }
  config.gid.range = range;
  return true;
}

// "4", or a range "1-8". NCCL's variable has no ranges, so a range is refused there.
bool assign_qps_per_connection(Config& config, const TextSetting& given) {
  constexpr std::int64_t kMaxQps = 128;  // as NCCL documents for NCCL_IB_QPS_PER_CONNECTION
  const std::size_t dash = given.value.find('-', 1);
  const std::optional<unsigned> min = parse_count(given.value.substr(0, dash), kMaxQps);
  if (!min) return false;
  config.qps_per_connection = {*min, *min};
  if (dash == std::string::npos) return true;
  const std::optional<unsigned> max = parse_count(given.value.substr(dash + 1), kMaxQps);
  if (!max || *max < *min || given.variable != std::string_view("VERBATIM_QPS_PER_CONNECTION")) return false;
  config.qps_per_connection.max = *max;
  return true;
}

bool assign_qp_pool(Config& config, const TextSetting& given) {
  const std::size_t cross = given.value.find('x', 1);
  if (cross == std::string::npos) return false;
  const std::optional<unsigned> peers = parse_count(given.value.substr(0, cross), 65536);
  const std::optional<unsigned> qps = parse_count(given.value.substr(cross + 1), 4096);
  if (!peers || !qps) return false;
  config.qp_pool = {*peers, *qps};
  return true;
}

using Lookup = std::function<const char*(const char*)>;

const char* read_environment(const char* name) {
  return std::getenv(name);
}

// nullptr: not set, or empty.
const char* find_value(const char* variable, const Lookup& lookup) {
  const char* value = variable != nullptr ? lookup(variable) : nullptr;
  return value != nullptr && *value != '\0' ? value : nullptr;
}

// The variable of a row whose value counts. `value` is nullptr if neither is set.
struct Given {
  const char* variable;
  const char* value;
};

Given find_given(const Row& row, const Lookup& lookup) {
  if (const char* value = find_value(row.shown.name, lookup); value != nullptr) return {row.shown.name, value};
  return {row.shown.alias, find_value(row.shown.alias, lookup)};
}

// Built by each call: a static table would be destroyed at exit, when other threads may still read it.
std::vector<Row> rows() {
  return {
      {"VERBATIM_VERBS_LIBRARY", "NCCL_IBVERBS_LIB", "path or soname", "`libibverbs.so.1`, then `libibverbs.so`",
       "The libibverbs to open.", any_text(&Config::verbs_library)},
      {"VERBATIM_MLX5_LIBRARY", nullptr, "path or soname", "`libmlx5.so.1`, then `libmlx5.so`",
       "The libmlx5 to open. The plugin works without libmlx5.", any_text(&Config::mlx5_library)},
      {"VERBATIM_HCA", "NCCL_IB_HCA", "`[^][=]name[:port[:rail[:plane]]],...`", "every active port",
       "Devices and ports to use: prefixes of names, or exact names after `=`. `^` before the list excludes them.",
       any_text(&Config::hca)},
      {"VERBATIM_MERGE_NICS", "NCCL_IB_MERGE_NICS", "0 or 1", "1",
       "Whether NCCL may merge devices into one, whose connections use all of them: see [Merged "
       "devices](#merged-devices).",
       one_of(&Config::merge_nics, {{"0", false}, {"1", true}})},
      {"VERBATIM_RMA", nullptr, "0 or 1", "1",
       "Whether the plugin offers NCCL's RMA interface: see [RMA](#rma). 0: its init refuses, and NCCL uses "
       "another RMA plugin or its own.",
       one_of(&Config::rma, {{"0", false}, {"1", true}})},
      {"VERBATIM_FAILOVER", nullptr, "0 or 1", "1",
       "Whether a connection of merged devices, and RMA where the atomics allow it, goes on over its other lanes when "
       "one fails: see [A lane that fails](#a-lane-that-fails) and [RMA](#rma).",
       one_of(&Config::failover, {{"0", false}, {"1", true}})},
      number_row(
          "VERBATIM_LANE_TIMEOUT_MS", nullptr, &Config::lane_timeout_ms, 0, 3'600'000, "5000",
          "A lane is down when nothing that was sent on it is acknowledged for so many milliseconds, while messages on "
          "another lane of the connection are; for RMA when nothing completes for so long, if there is another lane; "
          "0: "
          "never. See [A lane that fails](#a-lane-that-fails)."),
      number_row("VERBATIM_RECONNECT_S", nullptr, &Config::reconnect_s, 0, 86'400, "60",
                 "How long a connection, and RMA of merged devices, waits until a lane is back when none works, in "
                 "seconds; 0: "
                 "it fails at once. Also how long ranks of RMA wait, 10 s at most, until a TCP connection between them "
                 "that has ended with an error is made again. See [A lane that fails](#a-lane-that-fails)."),
      number_row("VERBATIM_MAX_RECVS", nullptr, &Config::max_recvs, 1, 8, "8",
                 "Receives that NCCL may group into one irecv."),
      {"VERBATIM_GID_INDEX", "NCCL_IB_GID_INDEX", "0 to 255, `auto` or -1, or `device=index,...`", "auto",
       "Index into the GID table (RoCE). Automatic: v2 before v1, then IPv4 before global IPv6 before link-local.",
       assign_gid_index},
      {"VERBATIM_ROCE_VERSION", "NCCL_IB_ROCE_VERSION_NUM", "1 or 2", "2",
       "RoCE version that is preferred when the GID is chosen automatically.",
       one_of(&GidSetting::roce_version, {{"1", 1U}, {"2", 2U}})},
      {"VERBATIM_ADDR_FAMILY", "NCCL_IB_ADDR_FAMILY", "`AF_INET` or `AF_INET6`", "AF_INET",
       "Address family that is preferred when the GID is chosen automatically.",
       one_of(&GidSetting::family, {{"AF_INET", AF_INET}, {"AF_INET6", AF_INET6}})},
      {"VERBATIM_ADDR_RANGE", "NCCL_IB_ADDR_RANGE", "`address/bits`", "none",
       "Addresses that are preferred, before version and family, when the GID is chosen automatically.",
       assign_address_range},
      {"VERBATIM_ROUTABLE_FLID_GID_INDEX", "NCCL_IB_ROUTABLE_FLID_GID_INDEX", "0 to 255", "1",
       "Index into the GID table (InfiniBand) that is used if its GID has an FLID, for routing between subnets; else "
       "0.",
       assign_flid_index},
      number_row("VERBATIM_TC", "NCCL_IB_TC", &Config::traffic_class, 0, 255, "the communicator's, else 0",
                 "Traffic class of RoCE packets and of InfiniBand packets with a GRH (DSCP * 4).", -1),
      number_row("VERBATIM_CTS_TC", "NCCL_IB_FIFO_TC", &Config::cts_traffic_class, 0, 255, "as VERBATIM_TC",
                 "Traffic class of what the receiver writes to the sender: the CTS entries.", -1),
      number_row("VERBATIM_SL", "NCCL_IB_SL", &Config::service_level, 0, 15, "the communicator's traffic class, else 0",
                 "InfiniBand service level.", -1),
      number_row("VERBATIM_PKEY", "NCCL_IB_PKEY", &Config::pkey_index, 0, 65535, "0", "Index into the P_Key table."),
      number_row("VERBATIM_TIMEOUT", "NCCL_IB_TIMEOUT", &Config::timeout, 1, 31, "20",
                 "Acknowledgement timeout of a QP: 4.096 us * 2^value."),
      number_row("VERBATIM_RETRY_CNT", "NCCL_IB_RETRY_CNT", &Config::retry_count, 0, 7, "7",
                 "Retransmissions after a timeout before a QP fails."),
      {"VERBATIM_RELAXED_ORDERING", "NCCL_IB_PCI_RELAXED_ORDERING", "0 off, 1 on, 2 on if libibverbs supports it", "2",
       "PCIe relaxed ordering for data buffers.",
       one_of(&Config::relaxed_ordering, {{"0", Switch::kOff}, {"1", Switch::kOn}, {"2", Switch::kAuto}})},
      {"VERBATIM_DATA_DIRECT", "NCCL_IB_DATA_DIRECT", "0, 1 or 2", "1",
       "Whether a NIC with a Data Direct interface (ConnectX-8) reaches GPU memory through it: 0: no, 1: yes, 2: NCCL "
       "gets both as devices. See [Data Direct](REFERENCE.md#data-direct).",
       one_of(&Config::data_direct, {{"0", DataDirect::kOff}, {"1", DataDirect::kOnly}, {"2", DataDirect::kBoth}})},
      {"VERBATIM_ADAPTIVE_ROUTING", "NCCL_IB_ADAPTIVE_ROUTING", "0, 1, or `auto` (also -1, -2)", "auto",
       "Whether the network may reorder packets. If on, the completion of a large message is signalled by a separate "
       "write after the data. That write carries at most the last bytes of the message. Automatic: on for InfiniBand, "
       "off for RoCE.",
       switch_value(&Config::adaptive_routing)},
      number_row("VERBATIM_AR_THRESHOLD", "NCCL_IB_AR_THRESHOLD", &Config::adaptive_routing_threshold, 0,
                 std::int64_t{1} << 40, "8192", "With adaptive routing: a message of more bytes than this is large.",
                 -2),
      {"VERBATIM_COMPLETION", nullptr, "`imm`, `atomic` or `auto`", "auto",
       "How the sender signals a completed message: by an immediate, or by an atomic on a word that the receiver "
       "polls. `atomic` is used only if both ends set and support it. Automatic: `imm`.",
       one_of(&Config::completion,
              {{"auto", Completion::kAuto}, {"imm", Completion::kImmediate}, {"atomic", Completion::kAtomic}})},
      {"VERBATIM_QPS_PER_CONNECTION", "NCCL_IB_QPS_PER_CONNECTION",
       "1 to 128, or a range `1-8` (not for NCCL's variable)", "1",
       "Queue pairs of a connection on each device. With a range: fewer if NCCL announces more connections.",
       assign_qps_per_connection},
      {"VERBATIM_QP_ORDER", nullptr, "`staggered` or `native`", "staggered",
       "Order of the queue pairs by number: see [QP order](#qp-order).",
       one_of(&Config::qp_order, {{"staggered", QpOrder::kStaggered}, {"native", QpOrder::kNative}})},
      {"VERBATIM_QP_POOL", nullptr, "`PxQ`: 1 to 65536 peers, 1 to 4096 queue pairs to each", "as NCCL announces",
       "Connections whose queue pairs are created in advance. Before table version 11 NCCL announces none.",
       assign_qp_pool},
      number_row(
          "VERBATIM_QP_GATHER_US", nullptr, &Config::qp_gather_us, 0, 2000, "300",
          "Microseconds without a connection request after which a burst of requests ends and its queue pairs are "
          "created."),
      {"VERBATIM_QP_DUMP", nullptr, "path; `%p` is the process ID, `%h` the host name", "none",
       "File to which the plugin appends one line for each queue pair of each connection.", any_text(&Config::qp_dump)},
      {"VERBATIM_SPLIT_DATA_ON_QPS", "NCCL_IB_SPLIT_DATA_ON_QPS", "0, 1, or `auto` (also -1, -2)", "auto",
       "Whether a message is split over the queue pairs of its connection. Automatic: if it is large.",
       switch_value(&Config::split_data_on_qps)},
      {"VERBATIM_ECE", "NCCL_IB_ECE_ENABLE", "0 or 1", "1",
       "Exchange enhanced connection establishment (ECE) options if the device supports them.",
       one_of(&Config::ece, {{"0", false}, {"1", true}})},
      {"VERBATIM_GDR_FLUSH_DISABLE", "NCCL_GDR_FLUSH_DISABLE", "0 or 1", "0",
       "1: data that has arrived in GPU memory is not flushed. For GPUs and platforms that need no flush.",
       one_of(&Config::flush_disabled, {{"0", false}, {"1", true}})},
      {"VERBATIM_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "`[^][=]name,...`", "InfiniBand, else Ethernet, else loopback",
       "Interface of the TCP side channel: prefixes of names, or exact names after `=`. `^` before the list excludes "
       "them. Of several the first is used, and any of them for a side channel that is made again.",
       any_text(&Config::socket_ifname)},
      {"VERBATIM_SOCKET_FAMILY", "NCCL_SOCKET_FAMILY", "`AF_INET` or `AF_INET6`", "either, IPv4 first",
       "Address family of the TCP side channel.",
       one_of(&Config::socket_family, {{"AF_INET", AF_INET}, {"AF_INET6", AF_INET6}})},
      {"VERBATIM_PSK_FILE", nullptr, "path", "none",
       "File with 16 to 4096 random bytes, the same on all hosts: who has read a handle of NCCL, but not this file, "
       "cannot connect. The first communicator of a process decides. See [SECURITY.md](../SECURITY.md).",
       any_text(&Config::psk_file)},
      number_row("VERBATIM_CONNECT_TIMEOUT_S", nullptr, &Config::connect_timeout_s, 1, 3600, "60",
                 "Seconds until a connection that is not established fails."),
      number_row(
          "VERBATIM_CLOSE_TIMEOUT_MS", nullptr, &Config::close_timeout_ms, 0, 600'000, "5000",
          "Milliseconds that the queue pairs of a closed connection are kept for a peer that has not closed yet."),
      number_row(
          "VERBATIM_KEEPALIVE_S", nullptr, &Config::keepalive_s, 0, 86'400, "300",
          "Seconds without a message and without data from the peer process; from 0.75 times so long on its "
          "connections fail if its host acknowledges the pings, or its NIC does not answer either, and RMA when the "
          "host of a rank acknowledges nothing over TCP for so long and no other connection can be made. 0: never."),
      number_row(
          "VERBATIM_STALL_WARN_S", nullptr, &Config::stall_warn_s, 0, 86'400, "30",
          "Seconds without progress, with operations outstanding, after which a warning reports the connection, or the "
          "peer and context of RMA, and the cause of the stall; 0: never."),
      number_row("VERBATIM_STALL_FAIL_S", nullptr, &Config::stall_fail_s, 0, 86'400, "0",
                 "Seconds until a stalled connection fails at both ends, and a stalled RMA communicator at all ranks; "
                 "0: never."),
      {"VERBATIM_STATE_DIR", nullptr, "path, or `none`", "`/tmp/verbatim-UID`",
       "Directory in which each process has a UNIX socket with its state (plugin/STATE.md): there `verbatim-top` and "
       "`verbatim-exporter` find it. It is made if it does not exist; only its user may have access to it.",
       any_text(&Config::state_directory)},
      {"VERBATIM_STATE_SOCKET", nullptr, "path", "none",
       "Another UNIX socket, at this path, from which the state of all connections and RMA contexts can be read as "
       "JSON. "
       "`%p` is replaced by the process ID, `%h` by the host name.",
       any_text(&Config::state_socket)},
      {"VERBATIM_LATENCY", nullptr, "0 or 1", "0",
       "Whether each connection measures latencies: see [Latencies](#latencies).",
       one_of(&Config::latency, {{"0", false}, {"1", true}})},
      {"VERBATIM_PROFILER", nullptr, "0 or 1", "0",
       "Whether NCCL's profiler plugin gets an event for each part of a message: see [NCCL's "
       "profiler](#nccls-profiler).",
       one_of(&Config::profiler, {{"0", false}, {"1", true}})},
      {"VERBATIM_STATS", nullptr, "path", "none",
       "File for the statistics of each connection and of RMA as JSON, written when NCCL calls finalize. `%p` is "
       "replaced by the "
       "process ID, `%h` by the host name.",
       any_text(&Config::stats_file)},
  };
}

}  // namespace

bool AddressRange::contains(const in6_addr& address) const {
  for (unsigned bit = 0; bit < bits; ++bit) {
    const unsigned mask = 0x80U >> bit % 8;
    if (((address.s6_addr[bit / 8] ^ prefix.s6_addr[bit / 8]) & mask) != 0) return false;
  }
  return true;
}

std::optional<unsigned> GidSetting::for_device(std::string_view device) const {
  for (const auto& [name, index] : per_device) {
    if (name == device) return index;
  }
  return everywhere;
}

Result<Config> Config::from(const Lookup& lookup) {
  Config config;
  for (const Row& row : rows()) {
    const Given given = find_given(row, lookup);
    if (given.value == nullptr || row.assign(config, {given.value, given.variable})) continue;
    VERBATIM_WARN("%s=%s is not valid. Next: set %s", given.variable, given.value, row.shown.allowed.c_str());
    return Error{ErrorKind::kUsage, EINVAL, "environment"};
  }
  return config;
}

Result<Config> Config::from_environment() {
  return from(read_environment);
}

std::vector<Setting> read_settings(const Lookup& lookup, Config& config) {
  std::vector<Setting> settings;
  for (const Row& row : rows()) {
    Setting setting{.shown = row.shown};
    if (const Given given = find_given(row, lookup); given.value != nullptr) {
      setting.set_by = given.variable;
      setting.value = given.value;
      setting.alias_ignored = given.variable != row.shown.alias && find_value(row.shown.alias, lookup) != nullptr;
      Config assigned = config;  // an invalid value may be stored in part
      setting.valid = row.assign(assigned, {given.value, given.variable});
      if (setting.valid) config = std::move(assigned);
    }
    settings.push_back(std::move(setting));
  }
  return settings;
}

std::vector<Setting> read_settings(Config& config) {
  return read_settings(read_environment, config);
}

std::vector<Variable> variables() {
  std::vector<Variable> shown;
  for (const Row& row : rows()) shown.push_back(row.shown);
  return shown;
}

namespace {

// NCCL's core reads NCCL_GIN_ENABLE and others of RMA itself, with any plugin.
bool is_of_nccls_transport(std::string_view name) {
  constexpr std::string_view kPrefixes[] = {"NCCL_IB_", "NCCL_GIN_IB_", "NCCL_GIN_GDAKI_", "NCCL_GIN_ERROR_QUERY_SEC"};
  return std::any_of(std::begin(kPrefixes), std::end(kPrefixes),
                     [&](std::string_view prefix) { return name.starts_with(prefix); });
}

// NCCL reads a number as strtoll does, and takes the default, which is 0, where there is none.
bool disables_infiniband(std::string_view entry) {
  constexpr std::string_view kName = "NCCL_IB_DISABLE=";
  return entry.starts_with(kName) && std::strtoll(entry.data() + kName.size(), nullptr, 0) != 0;
}

}  // namespace

UnusedVariables find_unused_variables(const char* const* environment) {
  const std::vector<Variable> known = variables();
  UnusedVariables found;
  for (; *environment != nullptr; ++environment) {
    const std::string_view entry = *environment;
    const std::string name(entry.substr(0, entry.find('=')));
    const bool used = std::any_of(known.begin(), known.end(), [&](const Variable& row) {
      return name == row.name || (row.alias != nullptr && name == row.alias);
    });
    // The secret of the tools' ranks is often exported in the shell from which jobs of NCCL start too.
    if (used || name == "NCCL_IB_DISABLE" || name == "VERBATIM_TOKEN") continue;
    if (is_of_nccls_transport(name)) found.of_nccl.push_back(name);
    if (!name.starts_with("VERBATIM_")) continue;
    const auto nearest = std::min_element(known.begin(), known.end(), [&](const Variable& a, const Variable& b) {
      return edit_distance(name, a.name) < edit_distance(name, b.name);
    });
    found.unknown.push_back({name, nearest->name});
  }
  return found;
}

void log_unused_variables(const char* const* environment) {
  for (const char* const* entry = environment; *entry != nullptr; ++entry) {
    if (*entry == std::string_view("MLX5_SINGLE_THREADED=1")) {
      VERBATIM_WARN(
          "%s removes the locks of libmlx5, but several threads of NCCL and of Verbatim use each device: data can be "
          "wrong. Next: unset it",
          *entry);
    }
    if (disables_infiniband(*entry)) {
      VERBATIM_WARN(
          "%s disables NCCL's own InfiniBand transport only: Verbatim uses RDMA. Next: unset it, or set "
          "NCCL_NET=Socket for a job without RDMA",
          *entry);
    }
  }
  const UnusedVariables found = find_unused_variables(environment);
  for (const UnusedVariables::Unknown& variable : found.unknown) {
    VERBATIM_WARN("%s is no setting of Verbatim and has no effect. Next: is %s meant? plugin/README.md lists all",
                  variable.name.c_str(), variable.nearest);
  }
  std::string unused;
  for (const std::string& name : found.of_nccl) unused.append(unused.empty() ? "" : ", ").append(name);
  if (!unused.empty()) VERBATIM_INFO("set, but not used by Verbatim: %s", unused.c_str());
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
