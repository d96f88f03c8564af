// A loaded net plugin and the context of one communicator in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "netapi/plugin.h"

namespace verbatim::ranks {

// Throws Failure with `what` and the result's name unless `result` is success.
[[noreturn]] void fail_call(nccl::Result result, const std::string& what);
inline void require(nccl::Result result, const char* what) {
  if (result != nccl::Result::kSuccess) fail_call(result, what);
}
inline void require(nccl::Result result, const std::string& what) {
  require(result, what.c_str());
}

// The plugin's index of the device of its first `merge` devices, of `devices`; `merge` at least 1. Throws Failure.
int merge_devices(netapi::Plugin& plugin, int devices, int merge);

class LoadedPlugin {
 public:
  // Version 0 selects the newest table that the plugin exports. `merge` above 0: only one device is used, which
  // consists of the plugin's first `merge` devices. Throws Failure.
  LoadedPlugin(const std::string& name, int api_version, std::uint64_t comm_id, int merge = 0);
  void finalize() { require(plugin_->finalize(context_), "finalize"); }

  netapi::Plugin& operator*() const { return *plugin_; }
  netapi::Plugin* operator->() const { return plugin_.get(); }
  const std::string& path() const { return path_; }  // netapi::Opened::path
  void* context() const { return context_; }
  const std::vector<netapi::Properties>& devices() const { return devices_; }  // at least one
  // The plugin's index of the first of them.
  int first_device() const { return first_device_; }
  // The smallest value of all devices.
  int max_recvs() const;
  std::size_t max_p2p_bytes() const;

 private:
  std::unique_ptr<netapi::Plugin> plugin_;
  std::string path_;
  void* context_ = nullptr;
  std::vector<netapi::Properties> devices_;
  int first_device_ = 0;
};

}  // namespace verbatim::ranks
