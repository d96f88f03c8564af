// Reads from NCCL's own log which transport and which protocols a run used.
#pragma once

#include <map>
#include <string>

namespace verbatim::gpu {

struct NcclLog {
  bool chose_network = false;                 // "Using network NET"
  bool used_network = false;                  // "via NET/NET/", at least once
  bool used_rma = false;                      // a line of Verbatim's RMA table for a set of contexts
  std::string plugin;                         // "Verbatim (v11)", empty when no plugin was loaded
  std::string channels;                       // number of channels of the first communicator
  std::map<std::string, unsigned> protocols;  // calls of collectives by protocol, where the log has them
};

NcclLog read_nccl_log(const std::string& path, const std::string& network);

}  // namespace verbatim::gpu
