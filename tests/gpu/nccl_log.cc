#include "nccl_log.h"

#include <fstream>
#include <string_view>

namespace verbatim::gpu {
namespace {

// The word that follows `mark` in `line`; empty when the mark is not there.
std::string word_after(std::string_view line, std::string_view mark) {
  const std::size_t found = line.find(mark);
  if (found == std::string_view::npos) return {};
  line.remove_prefix(found + mark.size());
  return std::string(line.substr(0, line.find_first_of(" :\r")));
}

}  // namespace

NcclLog read_nccl_log(const std::string& path, const std::string& network) {
  NcclLog log;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.find("Using network " + network) != std::string::npos) log.chose_network = true;
    if (line.find("via NET/" + network + "/") != std::string::npos) log.used_network = true;
    if (line.find("NET/Verbatim : RMA: rank ") != std::string::npos) log.used_rma = true;
    if (log.plugin.empty()) {
      const std::size_t mark = line.find("Loaded net plugin ");
      if (mark != std::string::npos) log.plugin = line.substr(mark + std::string_view("Loaded net plugin ").size());
    }
    if (log.channels.empty()) log.channels = word_after(line, " Channel 00/");
    if (const std::string protocol = word_after(line, " proto "); !protocol.empty()) ++log.protocols[protocol];
  }
  return log;
}

}  // namespace verbatim::gpu
