#include "ranks/loaded_plugin.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "netapi/log.h"
#include "ranks/failure.h"
#include "ranks/plugin_log.h"

namespace verbatim::ranks {

void fail_call(nccl::Result result, const std::string& what) {
  throw Failure(what + ": " + netapi::result_name(result));
}

LoadedPlugin::LoadedPlugin(const std::string& name, int api_version, std::uint64_t comm_id, int merge) {
  netapi::Opened opened = netapi::open_plugin(name, api_version);
  if (!opened.plugin) throw Failure(opened.error);
  plugin_ = std::move(opened.plugin);
  path_ = opened.path;
  choose_log_formatting(plugin_->name());
  require(plugin_->init(comm_id, {}, &context_), "init");
  int devices = 0;
  require(plugin_->devices(&devices), "devices");
  if (devices <= 0) throw Failure("the plugin has no device");
  if (merge > 0) {
    first_device_ = merge_devices(*plugin_, devices, merge);
    devices = 1;
  }
  for (int device = 0; device < devices; ++device) {
    require(plugin_->properties(first_device_ + device, &devices_.emplace_back()), "getProperties");
  }
}

int merge_devices(netapi::Plugin& plugin, int devices, int merge) {
  const std::string what = "--merge " + std::to_string(merge);
  if (merge > devices) {
    throw Failure(what + ": the plugin has only " + std::to_string(devices) + " devices. Next: give a smaller number");
  }
  if (merge == 1) return 0;
  if (!plugin.has_make_vdevice()) {
    throw Failure(what + ": table v" + std::to_string(plugin.api_version()) +
                  " of this plugin has no makeVDevice. Next: leave --merge out, or use a table from v9 on of a plugin "
                  "that merges devices");
  }
  std::vector<int> members(static_cast<std::size_t>(merge));
  std::iota(members.begin(), members.end(), 0);
  int device = 0;
  const nccl::Result result = plugin.make_vdevice(members, &device);
  if (result != nccl::Result::kSuccess) {
    throw Failure(what + ": makeVDevice: " + netapi::result_name(result) +
                  ". Next: --plugin-log shows why; tables before v12 allow 4 devices");
  }
  return device;
}

int LoadedPlugin::max_recvs() const {
  return std::min_element(devices_.begin(), devices_.end(),
                          [](const auto& a, const auto& b) { return a.max_recvs < b.max_recvs; })
      ->max_recvs;
}

std::size_t LoadedPlugin::max_p2p_bytes() const {
  return std::min_element(devices_.begin(), devices_.end(),
                          [](const auto& a, const auto& b) { return a.max_p2p_bytes < b.max_p2p_bytes; })
      ->max_p2p_bytes;
}

}  // namespace verbatim::ranks
