// A loaded RMA plugin and one communicator over it: connected ranks, their contexts and their registered memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "netapi/plugin.h"
#include "netapi/rma.h"
#include "ranks/coordinator_connection.h"

namespace verbatim::ranks {

// The calls block until all ranks make them; they come from one thread. They throw Failure.
class RmaComm {
 public:
  // Version 0: the newest table that the plugin exports.
  RmaComm(const std::string& name, int api_version, std::uint64_t comm_id);

  netapi::RmaPlugin& plugin() const { return *plugin_; }
  const std::string& path() const { return path_; }
  const std::vector<netapi::Properties>& devices() const { return devices_; }

  // Uses device `rank` modulo the number of devices.
  void connect(CoordinatorConnection& coordinator, int rank, int ranks, int contexts);
  void* register_memory(void* data, std::size_t bytes, std::uint64_t flags);
  // Everything, in NCCL's order.
  void close();

  int max_recvs() const;  // the smallest value of all devices

  void* coll() const { return coll_; }
  void* contexts() const { return contexts_; }

 private:
  std::unique_ptr<netapi::RmaPlugin> plugin_;
  std::string path_;
  std::vector<netapi::Properties> devices_;
  void* instance_ = nullptr;
  void* coll_ = nullptr;
  void* contexts_ = nullptr;
  std::vector<void*> registered_;
};

}  // namespace verbatim::ranks
