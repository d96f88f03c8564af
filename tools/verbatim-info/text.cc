#include "verbatim-info/text.h"

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli/table.h"

namespace verbatim::info {
namespace {

using Json = nlohmann::ordered_json;

// Text as it is, a number in digits.
std::string show(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

std::string show_or(const Json& value, const char* absent) {
  return value.is_null() ? absent : show(value);
}

std::string with_next(std::string line, const Json& owner) {
  if (owner.contains("next")) line += ". Next: " + show(owner["next"]);
  return line + "\n";
}

std::string library(const char* name, const Json& json, const char* absent) {
  std::string line = std::string(name) + ": ";
  if (json.is_null()) return line + absent + "\n";
  return line + show(json["path"]) + ", version " + show_or(json["version"], "unknown") + "\n";
}

std::string head(const Json& report) {
  const Json& init = report["init"];
  std::string text = "Verbatim " + show(report["version"]);
  if (!report["commit"].is_null()) text += " (commit " + show(report["commit"]) + ")";
  text += "\ninit: ";
  text += init["succeeds"].get<bool>() ? "succeeds, devices for NCCL: " + show(init["usable_ports"]) + "\n" : "fails\n";
  for (const Json& warning : init["warnings"]) text += "  warning: " + show(warning) + "\n";
  text += library("libibverbs", report["libraries"]["libibverbs"], "none");
  text += library("libmlx5", report["libraries"]["libmlx5"], "none; Verbatim works without it");
  const Json& side = report["side_channel"];
  text += side.is_null() ? "side channel: no interface\n"
                         : with_next("side channel: " + show(side["interface"]) + " " + show(side["address"]) +
                                         " (chosen by " + show(side["chosen_by"]) + ")",
                                     side);
  const auto limit = [&](const char* name, const char* key) {
    const Json& json = report["limits"][key];
    if (json.is_null()) return;
    text += with_next(std::string(name) + ": " + show_or(json["soft"], "unlimited") + " (hard limit " +
                          show_or(json["hard"], "unlimited") + ")",
                      json);
  };
  limit("locked memory, bytes", "locked_memory_bytes");
  limit("open descriptors", "descriptors");
  if (const Json& bar1 = report["limits"]["gpu_bar1_bytes"]; !bar1.is_null()) {
    text += "smallest BAR1 of the GPUs, bytes: " + show(bar1) + "\n";
  }
  return text;
}

std::string port_text(const Json& port) {
  std::string line = "  port " + show(port["port"]) + ": ";
  if (port["used"].get<bool>()) {
    line += "used, for NCCL " + show(port["nccl_name"]) + "\n";
  } else {
    line = with_next(line + "not used: " + show(port.value("reason", Json("unknown"))), port);
  }
  if (!port.contains("state")) return line;
  line += "    " + show(port["state"]) + ", " + show(port["link_layer"]) + ", " + show(port["speed_mbps"]) +
          " Mb/s, MTU " + show(port["mtu"]) + ", messages up to " + show(port["max_message_bytes"]) + " bytes";
  if (port.contains("lid")) line += ", LID " + show(port["lid"]);
  line += "\n";
  for (const Json& gid : port["gids"]) {
    line += "    GID " + show(gid["index"]) + " " + show(gid["gid"]) + " (" + show(gid["type"]) + ")";
    if (gid["taken"].get<bool>()) line += ", taken: " + show(gid["why"]);
    line += "\n";
  }
  if (port["gids"].empty()) line += "    no GID\n";
  return line;
}

std::string device_text(const Json& device) {
  std::string text = "\n" + show(device["name"]);
  if (device.contains("reason")) return with_next(text + ": not used: " + show(device["reason"]), device);
  text += ": PCI " + show_or(device["pci_path"], "none") + ", NUMA node " + show_or(device["numa_node"], "unknown") +
          ", firmware " + show(device["firmware"]) + (device["mlx5"].get<bool>() ? ", mlx5" : "") +
          (device["relaxed_ordering"].get<bool>() ? ", relaxed ordering" : "") + "\n";
  const Json& gpu = device["gpu_memory"];
  const bool peer = gpu["peer_memory"].get<bool>();
  const bool dma_buf = gpu["dma_buf"].get<bool>();
  text += with_next(peer && dma_buf ? "  GPU memory: by peer memory or dma-buf"
                    : peer          ? "  GPU memory: by peer memory"
                    : dma_buf       ? "  GPU memory: by dma-buf"
                                    : "  GPU memory: none: " + show(gpu["reason"]),
                    gpu);
  if (!device["data_direct"].is_null()) text += "  Data Direct: PCI " + show(device["data_direct"]) + "\n";
  const Json& limits = device["limits"];
  text += "  limits: " + show(limits["qps"]) + " QPs of " + show(limits["qp_work_requests"]) + " work requests, " +
          show(limits["cqs"]) + " CQs of " + show(limits["cq_entries"]) + " entries, " +
          show(limits["memory_regions"]) + " memory regions of " + show(limits["memory_region_bytes"]) + " bytes\n";
  if (const Json& group = limits["rdma_control_group"]; !group.is_null()) {
    text += "  limits of the rdma control group: " + show(group) + "\n";
  }
  for (const Json& port : device["ports"]) text += port_text(port);
  return text;
}

std::string forecast_text(const Json& forecast) {
  constexpr int kColumn = -17;
  constexpr const char* kKeys[] = {"pattern",        "connections",      "qps",        "flush_qps",
                                   "memory_regions", "registered_bytes", "descriptors"};
  std::string text = "\nforecast for one rank of " + show(forecast["ranks"]) + ", each on another host, " +
                     show(forecast["channels"]) + " channels, one device with one port:\n";
  std::vector<cli::Column> columns;
  for (const char* key : kKeys) columns.push_back({key, kColumn});
  const cli::Table table(columns);
  text += "  " + table.row({std::begin(kKeys), std::end(kKeys)}) + "\n";
  for (const Json& row : forecast["rows"]) {
    std::vector<cli::Cell> cells;
    for (const char* key : kKeys) cells.emplace_back(show(row[key]));
    text += "  " + table.row(cells) + "\n";
    if (row.contains("next")) text += "    Next: " + show(row["next"]) + "\n";
  }
  return text;
}

std::string settings_text(const Json& settings) {
  const cli::Table table({{"name", -32}, {"value", -1}});
  std::string set;
  std::string defaults;
  for (const Json& setting : settings) {
    std::string line = "  " + table.row({show(setting["name"]), show(setting["value"])});
    if (!setting.contains("variable")) {
      defaults += line + "\n";
      continue;
    }
    line += " (by " + show(setting["variable"]);
    if (setting.contains("file")) line += " in " + show(setting["file"]);
    if (setting.contains("ignored")) line += "; " + show(setting["ignored"]) + " is set too and has no effect";
    line += ")";
    if (!setting["valid"].get<bool>()) line += ": not valid";
    set += with_next(std::move(line), setting);
  }
  return "\nsettings that are set:\n" + (set.empty() ? "  none\n" : set) + "\nsettings with their default:\n" +
         defaults;
}

std::string unused_text(const Json& unused) {
  if (unused.empty()) return {};
  std::string text = "\nset, but not used by Verbatim:\n";
  for (const Json& variable : unused) {
    text += "  " + show(variable["name"]);
    if (variable.contains("nearest")) text += ". Next: is " + show(variable["nearest"]) + " meant?";
    text += "\n";
  }
  return text;
}

std::string nccl_text(const Json& nccl) {
  std::string text = "\n";
  if (const Json& found = nccl["library"]; found.is_null()) {
    text += "NCCL: none on the library path\n";
  } else {
    text += "NCCL: " + show(found["path"]) + ", version " + show(found["version"]) + ", newest net table v" +
            show_or(found["newest_table"], "9 or older") + "\n";
  }
  text += with_next("net plugins of NCCL_NET_PLUGIN=" + show_or(nccl["net_plugin"], "(not set)") +
                        ", NCCL_NET=" + show_or(nccl["net"], "(not set)") + ": Verbatim is " +
                        (nccl["takes_verbatim"].get<bool>() ? "taken" : "not taken"),
                    nccl);
  for (const Json& plugin : nccl["plugins"]) {
    text += "  " + show(plugin["entry"]) + ": ";
    if (plugin.contains("error")) {
      text += show(plugin["error"]) + "\n";
      continue;
    }
    text += show(plugin["path"]) + ", " + show_or(plugin["name"], "no net plugin") + ", tables";
    for (const Json& table : plugin["tables"]) text += " v" + show(table);
    text += plugin["taken"].get<bool>() ? ", taken\n" : "\n";
  }
  return text;
}

}  // namespace

std::string to_text(const Json& report) {
  std::string text = head(report);
  for (const Json& device : report["devices"]) text += device_text(device);
  if (report.contains("forecast")) text += forecast_text(report["forecast"]);
  return text + nccl_text(report["nccl"]) + unused_text(report["unused_variables"]) + settings_text(report["settings"]);
}

}  // namespace verbatim::info
