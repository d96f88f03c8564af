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
void require(nccl::Result result, const std::string& what);

class LoadedPlugin {
 public:
  // Version 0 selects the newest table that the plugin exports. Throws Failure.
  LoadedPlugin(const std::string& path, int api_version, std::uint64_t comm_id);
  void finalize() { require(plugin_->finalize(context_), "finalize"); }

  netapi::Plugin& operator*() const { return *plugin_; }
  netapi::Plugin* operator->() const { return plugin_.get(); }
  void* context() const { return context_; }
  const std::vector<netapi::Properties>& devices() const { return devices_; }  // at least one
  // The smallest value of all devices.
  int max_recvs() const;
  std::size_t max_p2p_bytes() const;

 private:
  std::unique_ptr<netapi::Plugin> plugin_;
  void* context_ = nullptr;
  std::vector<netapi::Properties> devices_;
};

}  // namespace verbatim::ranks
