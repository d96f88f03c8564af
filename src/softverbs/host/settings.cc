#include "softverbs/host/settings.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>
#include <system_error>

#include "base/log.h"
#include "softverbs/host/layout.h"

namespace verbatim::softverbs {
namespace {

struct NumberSetting {
  const char* name;
  std::uint32_t Settings::*member;
  std::uint32_t minimum;
  std::uint32_t maximum;
  bool is_id = false;  // may be hexadecimal, as ids are usually written
};

constexpr std::uint32_t kMaxLinkGbps = 10000;
constexpr std::uint32_t kMaxPaths = 64;
constexpr std::uint32_t kMaxLateMs = 3'600'000;
constexpr std::array<std::uint32_t, 8> kSpeedsGbps{10, 25, 40, 50, 100, 200, 400, 800};
constexpr std::uint32_t kMaxMsgBytes = 1U << 31;  // the limit of the InfiniBand specification for one message

constexpr std::array kNumbers{
    NumberSetting{"SOFTVERBS_DEVICES", &Settings::devices, 0, kMaxDevices},
    NumberSetting{"SOFTVERBS_SUBNETS", &Settings::subnets, 1, kMaxDevices},
    NumberSetting{"SOFTVERBS_LATE_HOST_MS", &Settings::late_host_ms, 0, kMaxLateMs},
    NumberSetting{"SOFTVERBS_LATE_GPU_MS", &Settings::late_gpu_ms, 0, kMaxLateMs},
    NumberSetting{"SOFTVERBS_ENGINES", &Settings::engines, 1, kMaxEngines},
    NumberSetting{"SOFTVERBS_QUANTUM", &Settings::quantum_bytes, 4096, 1U << 20},
    NumberSetting{"SOFTVERBS_PATHS", &Settings::paths, 1, kMaxPaths},
    NumberSetting{"SOFTVERBS_SEED", &Settings::seed, 0, ~0U},
    NumberSetting{"SOFTVERBS_VENDOR_ID", &Settings::vendor_id, 0, 0xffffff, true},
    NumberSetting{"SOFTVERBS_VENDOR_PART_ID", &Settings::vendor_part_id, 0, ~std::uint32_t{0}, true},
    NumberSetting{"SOFTVERBS_MTU", &Settings::mtu_bytes, 256, 4096},
    NumberSetting{"SOFTVERBS_MAX_MSG_SZ", &Settings::max_msg_bytes, 1, kMaxMsgBytes},
    NumberSetting{"SOFTVERBS_MAX_INLINE", &Settings::max_inline_bytes, 0, 4096},
    NumberSetting{"SOFTVERBS_MAX_QP", &Settings::max_qp, 0, kMaxQps},
    NumberSetting{"SOFTVERBS_MAX_QP_WR", &Settings::max_qp_wr, 1, 65536},
    NumberSetting{"SOFTVERBS_MAX_SGE", &Settings::max_sge, 1, kMaxSge},
    NumberSetting{"SOFTVERBS_MAX_CQ", &Settings::max_cq, 0, kMaxCqs},
    NumberSetting{"SOFTVERBS_MAX_CQE", &Settings::max_cqe, 1, 1U << 22},
    NumberSetting{"SOFTVERBS_MAX_SRQ", &Settings::max_srq, 0, kMaxSrqs},
    NumberSetting{"SOFTVERBS_MAX_SRQ_WR", &Settings::max_srq_wr, 1, 65536},
    NumberSetting{"SOFTVERBS_MAX_MR", &Settings::max_mr, 0, kMaxMrs - 1},
    NumberSetting{"SOFTVERBS_MAX_PD", &Settings::max_pd, 0, 65536},
};

void write_line(LogLevel level, const char*, int, const char* text) {
  if (level == LogLevel::kWarn) std::fprintf(stderr, "softverbs: %s\n", text);
}

std::optional<std::uint32_t> parse_number(std::string_view text, int base) {
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool read_number(const NumberSetting& setting, Settings& result) {
  const char* text = std::getenv(setting.name);
  if (text == nullptr || *text == '\0') return true;
  std::string_view view(text);
  const bool is_hexadecimal = setting.is_id && (view.starts_with("0x") || view.starts_with("0X"));
  if (is_hexadecimal) view.remove_prefix(2);
  const std::optional<std::uint32_t> value = parse_number(view, is_hexadecimal ? 16 : 10);
  if (value && *value >= setting.minimum && *value <= setting.maximum) {
    result.*setting.member = *value;
    return true;
  }
  VERBATIM_WARN("%s=%s is refused: the value must be a number from %u to %u. The program sees no device", setting.name,
                text, setting.minimum, setting.maximum);
  return false;
}

bool read_choice(const char* name, const char* when_true, const char* when_false, bool& value) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return true;
  const std::string_view view(text);
  if (view == when_true || view == when_false) {
    value = view == when_true;
    return true;
  }
  VERBATIM_WARN("%s=%s is refused: the value must be %s or %s. The program sees no device", name, text, when_true,
                when_false);
  return false;
}

template <typename Value>
struct Option {
  const char* name;
  Value value;
};

constexpr std::array kGpuMemoryOptions{
    Option<GpuMemory>{"dmabuf", GpuMemory::kDmabuf}, Option<GpuMemory>{"peer-memory", GpuMemory::kPeerMemory},
    Option<GpuMemory>{"both", GpuMemory::kBoth}, Option<GpuMemory>{"none", GpuMemory::kNone}};

constexpr std::array kAtomicsOptions{Option<Atomics>{"hca", Atomics::kHca}, Option<Atomics>{"glob", Atomics::kGlob},
                                     Option<Atomics>{"device", Atomics::kDevice}};

constexpr std::array kRqPsnOptions{Option<RqPsn>{"exact", RqPsn::kExact}, Option<RqPsn>{"zero", RqPsn::kZero},
                                   Option<RqPsn>{"cached", RqPsn::kCached}, Option<RqPsn>{"set", RqPsn::kSet},
                                   Option<RqPsn>{"accepted", RqPsn::kAccepted}};

constexpr std::array kRetryEventOptions{
    Option<std::optional<RetryEvent>>{"none", {}},
    Option<std::optional<RetryEvent>>{"fatal-before", RetryEvent{IBV_EVENT_QP_FATAL, true}},
    Option<std::optional<RetryEvent>>{"fatal-after", RetryEvent{IBV_EVENT_QP_FATAL, false}},
    Option<std::optional<RetryEvent>>{"access-before", RetryEvent{IBV_EVENT_QP_ACCESS_ERR, true}},
    Option<std::optional<RetryEvent>>{"access-after", RetryEvent{IBV_EVENT_QP_ACCESS_ERR, false}},
};

template <typename Value, std::size_t kCount>
bool read_option(const char* name, const std::array<Option<Value>, kCount>& options, Value& value) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return true;
  std::string allowed;
  for (const Option<Value>& option : options) {
    if (std::string_view(text) == option.name) {
      value = option.value;
      return true;
    }
    allowed += (allowed.empty() ? "" : ", ") + std::string(option.name);
  }
  VERBATIM_WARN("%s=%s is refused: the value must be one of %s. The program sees no device", name, text,
                allowed.c_str());
  return false;
}

// A driver: sets what it does in another way than the standard's best case. README.md says how sure each of it is.
using Profile = void (*)(Settings& settings);

constexpr std::uint32_t kLateMs = 2;

constexpr std::array kProfiles{
    Option<Profile>{"standard", [](Settings&) {}},
    Option<Profile>{"mlx5",
                    [](Settings& settings) {
                      settings.atomics = Atomics::kDevice;
                      settings.rq_psn = RqPsn::kAccepted;
                      settings.renumbers_gids = true;
                      settings.late_host_ms = settings.late_gpu_ms = kLateMs;
                    }},
    Option<Profile>{"bnxt_re",
                    [](Settings& settings) {
                      settings.atomics = Atomics::kGlob;
                      settings.rq_psn = RqPsn::kZero;
                      settings.retry_event = RetryEvent{IBV_EVENT_QP_ACCESS_ERR, true};
                      settings.flushes_late = true;
                      settings.has_gpu_atomics = false;
                      settings.renumbers_gids = true;
                      settings.late_host_ms = settings.late_gpu_ms = kLateMs;
                    }},
    Option<Profile>{"irdma",
                    [](Settings& settings) {
                      settings.first_sge = true;
                      settings.atomics = Atomics::kDevice;
                      settings.reuses_qps = false;
                      settings.rq_psn = RqPsn::kSet;
                      settings.renumbers_gids = true;
                      settings.late_host_ms = settings.late_gpu_ms = kLateMs;
                      settings.retry_event = RetryEvent{IBV_EVENT_QP_FATAL, false};
                      settings.flushes_late = true;
                    }},
};

// Comes before the other variables, which override it.
bool read_profile(Settings& settings) {
  Profile profile = kProfiles[0].value;
  if (!read_option("SOFTVERBS_PROFILE", kProfiles, profile)) return false;
  profile(settings);
  return true;
}

template <typename Numbers>
std::string joined(const Numbers& numbers) {
  std::string list;
  for (const std::uint32_t number : numbers) list += (list.empty() ? "" : ", ") + std::to_string(number);
  return list;
}

bool is_one_of(const char* name, std::uint32_t value, std::initializer_list<std::uint32_t> allowed) {
  if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return true;
  VERBATIM_WARN("%s=%u is refused: the value must be one of %s. The program sees no device", name, value,
                joined(allowed).c_str());
  return false;
}

// "100,25": a number for each of the first devices. The last one is also for all further devices.
template <typename IsAllowed>
bool read_per_device(const char* name, PerDevice& values, const std::string& allowed, IsAllowed is_allowed) {
  const char* given = std::getenv(name);
  if (given == nullptr || *given == '\0') return true;
  std::string_view rest(given);
  for (std::size_t device = 0;; ++device) {
    const std::size_t comma = rest.find(',');
    const std::optional<std::uint32_t> value = parse_number(rest.substr(0, comma), 10);
    if (!value || !is_allowed(*value)) {
      VERBATIM_WARN(
          "%s=%s is refused: the value must be %s, or a list of such numbers, separated by commas. The program sees no "
          "device",
          name, given, allowed.c_str());
      return false;
    }
    if (device < values.size()) std::fill(values.begin() + device, values.end(), *value);
    if (comma == std::string_view::npos) return true;
    rest.remove_prefix(comma + 1);
  }
}

// A port without a rate cannot take part in the virtual clock.
bool read_link_gbps(PerDevice& gbps) {
  constexpr const char* kVariable = "SOFTVERBS_LINK_GBPS";
  const std::string allowed = "a number from 0 to " + std::to_string(kMaxLinkGbps);
  if (!read_per_device(kVariable, gbps, allowed, [](std::uint32_t value) { return value <= kMaxLinkGbps; }))
    return false;
  const auto unlimited = static_cast<std::size_t>(std::count(gbps.begin(), gbps.end(), 0U));
  if (unlimited == 0 || unlimited == gbps.size()) return true;
  VERBATIM_WARN("%s=%s is refused: 0 (no limit) is for all devices or for none. The program sees no device", kVariable,
                std::getenv(kVariable));
  return false;
}

bool read_speed_gbps(PerDevice& gbps) {
  return read_per_device("SOFTVERBS_SPEED_GBPS", gbps, "one of " + joined(kSpeedsGbps), [](std::uint32_t value) {
    return std::find(kSpeedsGbps.begin(), kSpeedsGbps.end(), value) != kSpeedsGbps.end();
  });
}

// 4096 is the largest MTU: a multiple of it holds whole packets of any MTU.
bool is_quantum_whole(std::uint32_t bytes) {
  if (bytes % 4096 == 0) return true;
  VERBATIM_WARN("SOFTVERBS_QUANTUM=%u is refused: the value must be a multiple of 4096. The program sees no device",
                bytes);
  return false;
}

// With the inline engine a port sends only while its program calls verbs. All other ports would wait for its grant.
bool has_engine_for_link(const Settings& settings) {
  if (!settings.has_rate() || settings.threaded) return true;
  VERBATIM_WARN(
      "SOFTVERBS_LINK_GBPS=%s is refused with SOFTVERBS_ENGINE=inline: ports with a rate need a device thread. "
      "The program sees no device. Next: set SOFTVERBS_ENGINE=thread or unset SOFTVERBS_LINK_GBPS",
      std::getenv("SOFTVERBS_LINK_GBPS"));
  return false;
}

bool read_directory(std::string& directory) {
  const char* text = std::getenv("SOFTVERBS_DIRECTORY");
  if (text == nullptr || *text == '\0') return true;
  directory = text;
  struct stat info {};
  if (directory.front() == '/' && ::stat(text, &info) == 0 && S_ISDIR(info.st_mode)) return true;
  VERBATIM_WARN(
      "SOFTVERBS_DIRECTORY=%s is refused: the value must be the absolute path of a directory. The program sees no "
      "device",
      text);
  return false;
}

// The name becomes part of the names of shared files.
bool read_name_space(std::string& name) {
  const char* text = std::getenv("SOFTVERBS_NAMESPACE");
  if (text == nullptr || *text == '\0') return true;
  name = text;
  constexpr std::size_t kMaxNameBytes = 64;
  const bool plain = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  });
  if (plain && name.size() <= kMaxNameBytes) return true;
  VERBATIM_WARN(
      "SOFTVERBS_NAMESPACE=%s is refused: the value must be at most %zu characters of a-z, A-Z, 0-9, '_' and '-'. The "
      "program sees no device",
      text, kMaxNameBytes);
  return false;
}

// SOFTVERBS_FAULTS holds the clauses, or @FILE for a file with the clauses.
bool read_faults(FaultScript& faults) {
  const char* seed = std::getenv("SOFTVERBS_SEED");
  const char* given = std::getenv("SOFTVERBS_FAULTS");
  std::string text = given != nullptr ? given : "";
  if (text.starts_with('@')) {
    std::ifstream file(text.substr(1));
    std::ostringstream contents;
    if (!file || !(contents << file.rdbuf())) {
      VERBATIM_WARN("SOFTVERBS_FAULTS=%s is refused: the file cannot be read or is empty. The program sees no device",
                    given);
      return false;
    }
    text = contents.str();
  }
  if (seed != nullptr && *seed != '\0') text = "seed=" + std::string(seed) + "\n" + text;
  std::variant<FaultScript, std::string> parsed = parse_faults(text);
  if (const auto* refused = std::get_if<std::string>(&parsed)) {
    VERBATIM_WARN("SOFTVERBS_FAULTS is refused: %s. The program sees no device", refused->c_str());
    return false;
  }
  faults = std::get<FaultScript>(std::move(parsed));
  return true;
}

// "0000:3b:00.0,0000:3b:00.1"
bool read_pci(const char* name, std::vector<std::string>& addresses) {
  const char* given = std::getenv(name);
  if (given == nullptr) return true;
  constexpr std::string_view kShape = "0000:00:00.0";
  const auto fits = [](char c, char shape) {
    return shape == '0' ? (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') : c == shape;
  };
  std::istringstream list(given);
  list.exceptions(std::ios::badbit);  // else a list would end where memory runs out
  for (std::string address; std::getline(list, address, ',');) {
    for (char& c : address) c = c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c;
    if (address.size() != kShape.size() || !std::equal(address.begin(), address.end(), kShape.begin(), fits)) {
      VERBATIM_WARN(
          "%s=%s is refused: the value must be a list of PCI addresses such as 0000:3b:00.0, separated by commas. The "
          "program sees no device",
          name, given);
      return false;
    }
    addresses.push_back(std::move(address));
  }
  return true;
}

}  // namespace

std::optional<Settings> read_settings() {
  Settings result;
  if (!read_profile(result)) return std::nullopt;
  for (const NumberSetting& setting : kNumbers) {
    if (!read_number(setting, result)) return std::nullopt;
  }
  if (!read_choice("SOFTVERBS_ENGINE", "thread", "inline", result.threaded)) return std::nullopt;
  if (!read_choice("SOFTVERBS_LINK_LAYER", "roce", "ib", result.ethernet)) return std::nullopt;
  if (!read_choice("SOFTVERBS_CROSS_MEMORY", "forbidden", "allowed", result.forbid_cross_memory)) return std::nullopt;
  if (!read_choice("SOFTVERBS_ARBITRATION", "arrival", "qpn", result.by_arrival)) return std::nullopt;
  if (!is_quantum_whole(result.quantum_bytes)) return std::nullopt;
  if (!read_link_gbps(result.link_gbps)) return std::nullopt;
  if (!has_engine_for_link(result)) return std::nullopt;
  if (!read_choice("SOFTVERBS_ORDERING", "adaptive-routing", "in-order", result.adaptive_routing)) return std::nullopt;
  if (!read_choice("SOFTVERBS_DMABUF", "1", "0", result.dmabuf)) return std::nullopt;
  if (!read_choice("SOFTVERBS_GRH", "required", "optional", result.grh_required)) return std::nullopt;
  if (!read_choice("SOFTVERBS_QP_REUSE", "allowed", "refused", result.reuses_qps)) return std::nullopt;
  if (!read_option("SOFTVERBS_RQ_PSN", kRqPsnOptions, result.rq_psn)) return std::nullopt;
  if (!read_option("SOFTVERBS_RETRY_EVENT", kRetryEventOptions, result.retry_event)) return std::nullopt;
  if (!read_choice("SOFTVERBS_FLUSH", "late", "at-once", result.flushes_late)) return std::nullopt;
  if (!read_choice("SOFTVERBS_GPU_ATOMICS", "allowed", "refused", result.has_gpu_atomics)) return std::nullopt;
  if (!read_choice("SOFTVERBS_GID_TABLE", "renumbered", "fixed", result.renumbers_gids)) return std::nullopt;
  if (!read_option("SOFTVERBS_ATOMICS", kAtomicsOptions, result.atomics)) return std::nullopt;
  if (!read_choice("SOFTVERBS_LOCK_LIMIT", "kernel", "none", result.has_lock_limit)) return std::nullopt;
  if (!read_choice("SOFTVERBS_GPU_COPY", "direct", "staged", result.copies_directly)) return std::nullopt;
  if (!read_option("SOFTVERBS_GPU_MEMORY", kGpuMemoryOptions, result.gpu_memory)) return std::nullopt;
  if (!read_choice("SOFTVERBS_EMPTY_WRITE", "first-sge", "empty", result.first_sge)) return std::nullopt;
  if (!is_one_of("SOFTVERBS_MTU", result.mtu_bytes, {256, 512, 1024, 2048, 4096})) return std::nullopt;
  if (!read_speed_gbps(result.speed_gbps)) return std::nullopt;
  if (!read_name_space(result.name_space)) return std::nullopt;
  if (!read_directory(result.directory)) return std::nullopt;
  if (!read_pci("SOFTVERBS_PCI", result.pci)) return std::nullopt;
  if (!read_pci("SOFTVERBS_DATA_DIRECT", result.data_direct)) return std::nullopt;
  if (!read_faults(result.faults)) return std::nullopt;
  if (const char* file = std::getenv("SOFTVERBS_TRACE"); file != nullptr) result.trace_file = file;
  if (const char* file = std::getenv("SOFTVERBS_STATS"); file != nullptr) result.stats_file = file;
  return result;
}

const Settings* settings() {
  static const std::optional<Settings> instance = [] {
    set_log_sink(write_line);
    return read_settings();
  }();
  return instance ? &*instance : nullptr;
}

}  // namespace verbatim::softverbs
