// What NCCL's own log says of a run: which transport and which protocols it used.
#pragma once

#include <map>
#include <string>

namespace verbatim::gpu {

struct NcclLog {
  bool chose_network = false;                 // "Using network NET"
  bool used_network = false;                  // "via NET/NET/", at least once
  std::string plugin;                         // "Verbatim (v11)", empty when none was loaded
  std::string channels;                       // how many channels the first communicator had
  std::map<std::string, unsigned> protocols;  // calls of collectives by protocol, where the log tells
};

NcclLog read_nccl_log(const std::string& path, const std::string& network);

}  // namespace verbatim::gpu
