#include "verbatim-info/report.h"

#include <dlfcn.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/log.h"
#include "base/socket.h"
#include "base/socket_interface.h"
#include "base/state_directory.h"
#include "base/version.h"
#include "net/context/context.h"
#include "net/context/forecast.h"
#include "net/context/stats.h"
#include "verbatim-info/nccl.h"
#include "verbs/device_inventory.h"
#include "verbs/gid.h"
#include "verbs/mlx5.h"
#include "verbs/sysfs.h"
#include "verbs/verbs.h"

namespace verbatim::info {
namespace {

using Json = nlohmann::ordered_json;

// For a job of any size: plugin/CLUSTER.md.
constexpr std::uint64_t kEnoughDescriptors = 65'536;

// ---- what the plugin warns of

std::mutex g_warnings_mutex;  // the monitor logs too
std::vector<std::string> g_warnings;

void keep_warning(LogLevel level, const char*, int, const char* text) {
  if (level != LogLevel::kWarn) return;
  const std::lock_guard<std::mutex> lock(g_warnings_mutex);
  if (std::find(g_warnings.begin(), g_warnings.end(), text) == g_warnings.end()) g_warnings.emplace_back(text);
}

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator found("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(found), end(found)));
}

struct InitResult {
  bool succeeds = false;
  std::size_t ports = 0;
  std::size_t descriptors = 0;  // that init has opened
};

// The plugin's init, which writes no file and opens no socket that others see.
InitResult try_init() {
  InitResult result;
  Result<Config> config = Config::from_environment();
  if (!config) return result;
  warn_of_stats_path(expand_path(config->stats_file, read_host_name()));
  config->stats_file.clear();
  config->state_socket.clear();
  config->state_directory = kNoStateDirectory;
  const std::size_t before = open_descriptors();
  const Result<Context*> context = open_context(*std::move(config), -1);
  if (!context) return result;
  result.succeeds = true;
  result.descriptors = open_descriptors() - before;
  if (const Result<std::size_t> count = device_count()) result.ports = *count;
  close_context(*context);
  return result;
}

// ---- libraries

// The file that `symbol` is in; its version is what follows ".so." in its name: rdma-core has no other.
Json library_json(const void* symbol) {
  Dl_info info{};
  if (symbol == nullptr || ::dladdr(symbol, &info) == 0) return nullptr;
  std::error_code ignored;
  const std::filesystem::path real = std::filesystem::canonical(info.dli_fname, ignored);
  const std::string path = real.empty() ? info.dli_fname : real.string();
  const std::size_t suffix = path.rfind(".so.");
  return {{"path", path}, {"version", suffix != std::string::npos ? Json(path.substr(suffix + 4)) : Json(nullptr)}};
}

// ---- system

bool is_loopback(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

Json side_channel_json(const Config& config) {
  const Result<SocketInterface> chosen = choose_socket_interface(config);
  if (!chosen) return nullptr;
  const bool loopback = is_loopback(chosen->address);
  Json json = {{"interface", chosen->name},
               {"address", host_to_string(chosen->address)},
               {"chosen_by", config.socket_ifname.value.empty() ? "default" : config.socket_ifname.variable},
               {"loopback", loopback}};
  if (loopback) json["next"] = "for a job of several hosts, set VERBATIM_SOCKET_IFNAME to an interface that they reach";
  return json;
}

Json limit_json(decltype(RLIMIT_NOFILE) resource, std::uint64_t enough, const char* next) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0) return nullptr;
  const auto number = [](rlim_t value) { return value == RLIM_INFINITY ? Json(nullptr) : Json(value); };
  Json json = {{"soft", number(limit.rlim_cur)}, {"hard", number(limit.rlim_max)}};
  if (limit.rlim_cur < enough) json["next"] = next;
  return json;
}

// ---- devices

const char* state_name(ibv_port_state state) {
  constexpr const char* kNames[] = {"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"};
  return state < std::size(kNames) ? kNames[state] : "unknown";
}

const char* gid_type(const GidEntry& entry, const ibv_port_attr& port) {
  if (port.link_layer != IBV_LINK_LAYER_ETHERNET) return "InfiniBand";
  switch (entry.version) {
    case RoceVersion::kV1:
      return "RoCE v1";
    case RoceVersion::kV2:
      return "RoCE v2";
    default:
      return "RoCE";
  }
}

Json gids_json(const Device& device, std::uint8_t port_num, const ibv_port_attr& port, const Config& config) {
  const std::vector<GidEntry> entries = read_gid_table(device.verbs(), device.context(), port_num, port);
  const Result<GidEntry> chosen =
      choose_gid(device.verbs(), device.context(), device.name().c_str(), port_num, port, config.gid);
  Json gids = Json::array();
  for (const GidEntry& entry : entries) {
    const bool taken = chosen && chosen->index == entry.index;
    Json json = {
        {"index", entry.index}, {"gid", to_string(entry.gid)}, {"type", gid_type(entry, port)}, {"taken", taken}};
    if (taken) json["why"] = why_chosen(entry, entries, device.name().c_str(), port, config.gid);
    gids.push_back(std::move(json));
  }
  return gids;
}

// `used`: nullptr if it is not used.
Json port_json(const DeviceSurvey& survey, const Device& device, std::uint8_t port_num, const Port* used,
               const Config& config) {
  const auto skipped = std::find_if(survey.skipped.begin(), survey.skipped.end(), [&](const SkippedPort& port) {
    return port.device == device.name() && port.port_num == port_num;
  });
  Json json = {{"port", port_num}, {"used", used != nullptr}};
  if (used != nullptr) json["nccl_name"] = used->nccl_name;
  if (skipped != survey.skipped.end()) {
    json["reason"] = skipped->reason;
    json["next"] = next_step(*skipped, config);
  }
  const Result<ibv_port_attr> port = device.verbs().port_attributes(device.context(), port_num);
  if (!port) return json;
  const bool roce = port->link_layer == IBV_LINK_LAYER_ETHERNET;
  const std::uint32_t speed = used != nullptr ? used->speed_mbps : port_speed_mbps(device, port_num, *port);
  json["state"] = state_name(port->state);
  json["link_layer"] = roce ? "RoCE" : "InfiniBand";
  json["speed_mbps"] = speed;
  json["mtu"] = 128U << static_cast<unsigned>(port->active_mtu);
  json["max_message_bytes"] = port->max_msg_sz;
  if (!roce) json["lid"] = port->lid;
  json["gids"] = gids_json(device, port_num, *port, config);
  return json;
}

Json device_json(const DeviceSurvey& survey, const Device& device, const Config& config, const std::string& root) {
  const ibv_device_attr& attributes = device.attributes();
  const unsigned memory = ptr_support(device, survey.peer_memory);
  const std::optional<std::string> pci = sysfs_pci_path(device.sysfs_path());
  const std::optional<int> node = sysfs_numa_node(device.sysfs_path());
  Json gpu = {{"peer_memory", (memory & kPtrCuda) != 0}, {"dma_buf", (memory & kPtrDmaBuf) != 0}};
  if (memory == kPtrHost) {
    gpu["reason"] = why_no_gpu_memory(device);
    gpu["next"] = "load nvidia_peermem, if this host has NVIDIA GPUs";
  }
  const std::string& direct = device.data_direct_path();
  const std::string group = rdma_control_group_limit(root, device.name());
  Json ports = Json::array();
  for (unsigned port_num = 1; port_num <= attributes.phys_port_cnt; ++port_num) {
    const auto add = [&](const Port* used) {
      ports.push_back(port_json(survey, device, static_cast<std::uint8_t>(port_num), used, config));
    };
    const std::size_t before = ports.size();
    for (const Port& port : survey.ports) {
      if (port.device == &device && port.port_num == port_num) add(&port);
    }
    if (ports.size() == before) add(nullptr);
  }
  return {{"name", device.name()},
          {"firmware", attributes.fw_ver},
          {"mlx5", device.is_mlx5()},
          {"pci_path", pci ? Json(*pci) : Json(nullptr)},
          {"data_direct", direct.empty() ? Json(nullptr) : Json(direct)},
          {"numa_node", node ? Json(*node) : Json(nullptr)},
          {"gpu_memory", std::move(gpu)},
          {"relaxed_ordering", device.relaxed_ordering()},
          {"limits",
           {{"qps", attributes.max_qp},
            {"qp_work_requests", attributes.max_qp_wr},
            {"cqs", attributes.max_cq},
            {"cq_entries", attributes.max_cqe},
            {"memory_regions", attributes.max_mr},
            {"memory_region_bytes", attributes.max_mr_size},
            {"rdma_control_group", group.empty() ? Json(nullptr) : Json(group)}}},
          {"ports", std::move(ports)}};
}

Json devices_json(const DeviceSurvey& survey, const Config& config, const std::string& root) {
  Json devices = Json::array();
  for (const std::unique_ptr<Device>& device : survey.devices) {
    devices.push_back(device_json(survey, *device, config, root));
  }
  for (const SkippedPort& skipped : survey.skipped) {
    if (skipped.port_num != 0) continue;
    devices.push_back({{"name", skipped.device},
                       {"reason", skipped.reason},
                       {"next", next_step(skipped, config)},
                       {"ports", Json::array()}});
  }
  return devices;
}

// ---- settings

// Without the Markdown of plugin/README.md.
std::string plain(std::string text) {
  std::erase(text, '`');
  return text;
}

// `file_of`: the variables that come from a configuration file of NCCL.
Json settings_json(const std::vector<Setting>& settings, const std::map<std::string, std::string>& file_of) {
  Json all = Json::array();
  for (const Setting& setting : settings) {
    const bool is_default = setting.set_by == nullptr;
    Json json = {{"name", setting.shown.name},
                 {"value", is_default ? plain(setting.shown.default_value) : setting.value},
                 {"origin", is_default                             ? "default"
                            : setting.set_by == setting.shown.name ? "verbatim"
                                                                   : "nccl"}};
    if (!is_default) {
      json["variable"] = setting.set_by;
      if (const auto file = file_of.find(setting.set_by); file != file_of.end()) json["file"] = file->second;
    }
    json["valid"] = setting.valid;
    if (!setting.valid) json["next"] = "set " + plain(setting.shown.allowed);
    if (setting.alias_ignored) json["ignored"] = setting.shown.alias;
    all.push_back(std::move(json));
  }
  return all;
}

Json unused_json() {
  const UnusedVariables found = find_unused_variables(environ);
  Json all = Json::array();
  for (const std::string& name : found.of_nccl) all.push_back({{"name", name}});
  for (const UnusedVariables::Unknown& variable : found.unknown) {
    all.push_back({{"name", variable.name}, {"nearest", variable.nearest}});
  }
  return all;
}

// ---- forecast

// What is to be raised for these needs, "" if nothing.
std::string too_little(std::size_t descriptors, const Forecast& needs, std::size_t device_qps) {
  std::string text;
  const auto exceeds = [&](std::uint64_t need, std::uint64_t limit, const char* next) {
    if (need > limit) text.append(text.empty() ? "" : ", ").append(next);
  };
  const auto soft_limit = [](decltype(RLIMIT_NOFILE) resource) {
    rlimit limit{};
    return ::getrlimit(resource, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
  };
  exceeds(descriptors, soft_limit(RLIMIT_NOFILE), "raise 'ulimit -n'");
  exceeds(needs.registered_bytes, soft_limit(RLIMIT_MEMLOCK), "raise 'ulimit -l'");
  exceeds(needs.qps + needs.flush_qps, device_qps, "use more devices, or fewer QPs or channels");
  return text;
}

// `device_qps`: of the used device that allows the fewest.
Json forecast_json(const JobSize& job, const Config& config, const InitResult& init, std::size_t device_qps) {
  // NCCL announces four peers for rings and trees.
  constexpr unsigned kCollectivePeers = 4;
  const unsigned peers = job.ranks - 1;
  const auto row = [&](const char* pattern, std::size_t flows, const AnnouncedFlows& announced) -> Json {
    const Forecast needs = forecast(config, 1, flows, announced);
    const std::size_t descriptors = needs.descriptors + init.descriptors;
    Json json = {{"pattern", pattern},
                 {"connections", needs.connections},
                 {"qps", needs.qps},
                 {"flush_qps", needs.flush_qps},
                 {"memory_regions", needs.memory_regions},
                 {"registered_bytes", needs.registered_bytes},
                 {"descriptors", descriptors}};
    if (std::string next = too_little(descriptors, needs, device_qps); !next.empty()) json["next"] = std::move(next);
    return json;
  };
  return {{"ranks", job.ranks},
          {"channels", job.channels},
          {"rows",
           {row("ring", job.channels, {.peers = kCollectivePeers, .flows = job.channels, .collective = true}),
            row("every peer", std::size_t{peers} * job.channels, {.peers = peers, .flows = job.channels})}}};
}

}  // namespace

Json make_report(const std::optional<JobSize>& job, const std::string& root) {
  set_log_sink(keep_warning);
  const std::map<std::string, std::string> file_of = read_configuration_files();
  const InitResult init = try_init();
  // The rest describes as much as is possible, also where init fails early.
  Config config;
  const std::vector<Setting> settings = read_settings(config);
  const Json side_channel = side_channel_json(config);
  const Result<std::unique_ptr<const Verbs>> verbs = Verbs::load(config.verbs_library);
  const std::optional<Mlx5> mlx5 = Mlx5::load(config.mlx5_library);
  Json devices = Json::array();
  std::size_t device_qps = SIZE_MAX;
  if (verbs) {
    const Result<DeviceSurvey> survey =
        DeviceSurvey::make(**verbs, mlx5 ? &*mlx5 : nullptr, config, root, DeviceSurvey::Unused::kKeep);
    if (survey) {
      devices = devices_json(*survey, config, root);
      for (const Port& port : survey->ports) {
        device_qps = std::min(device_qps, static_cast<std::size_t>(std::max(port.device->attributes().max_qp, 0)));
      }
    }
  }
  const auto address = [](auto* function) { return reinterpret_cast<const void*>(function); };
  const std::optional<std::uint64_t> bar1 = smallest_gpu_bar1(root);
  const std::lock_guard<std::mutex> lock(g_warnings_mutex);
  Json report = {{"schema", kSchema},
                 {"version", kRelease},
                 {"commit", *kCommit == '\0' ? Json(nullptr) : Json(kCommit)},
                 {"init", {{"succeeds", init.succeeds}, {"usable_ports", init.ports}, {"warnings", g_warnings}}},
                 {"libraries",
                  {{"libibverbs", library_json(verbs ? address((*verbs)->get_device_list) : nullptr)},
                   {"libmlx5", library_json(mlx5 ? address(mlx5->is_supported) : nullptr)}}},
                 {"side_channel", side_channel},
                 {"limits",
                  {{"locked_memory_bytes", limit_json(RLIMIT_MEMLOCK, RLIM_INFINITY,
                                                      "'ulimit -l unlimited', or the same for "
                                                      "the service that starts the job")},
                   {"descriptors", limit_json(RLIMIT_NOFILE, kEnoughDescriptors, "for large jobs 'ulimit -n 65536'")},
                   {"gpu_bar1_bytes", bar1 ? Json(*bar1) : Json(nullptr)}}},
                 {"devices", std::move(devices)},
                 {"settings", settings_json(settings, file_of)},
                 {"unused_variables", unused_json()},
                 {"nccl", nccl_json()}};
  if (job) report["forecast"] = forecast_json(*job, config, init, device_qps);
  return report;
}

}  // namespace verbatim::info
