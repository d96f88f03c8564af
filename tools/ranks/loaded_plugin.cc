#include "ranks/loaded_plugin.h"

#include <algorithm>
#include <utility>

#include "netapi/log.h"
#include "ranks/failure.h"
#include "ranks/plugin_log.h"

namespace verbatim::ranks {

void require(nccl::Result result, const std::string& what) {
  if (result == nccl::Result::kSuccess) return;
  throw Failure(what + ": " + netapi::result_name(result));
}

LoadedPlugin::LoadedPlugin(const std::string& path, int api_version, std::uint64_t comm_id) {
  netapi::Opened opened = netapi::open_plugin(path, api_version);
  if (!opened.plugin) throw Failure(opened.error);
  plugin_ = std::move(opened.plugin);
  choose_log_formatting(*plugin_);
  require(plugin_->init(comm_id, {}, &context_), "init");
  int devices = 0;
  require(plugin_->devices(&devices), "devices");
  if (devices <= 0) throw Failure("the plugin has no device");
  for (int device = 0; device < devices; ++device) {
    require(plugin_->properties(device, &devices_.emplace_back()), "getProperties");
  }
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
