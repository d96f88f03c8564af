#include "verbatim-eplb/transport.h"

#include <cstdlib>
#include <numeric>

namespace verbatim::eplb {

std::size_t Operation::bytes() const {
  return std::accumulate(parts.begin(), parts.end(), std::size_t{0},
                         [](std::size_t sum, const Part& part) { return sum + part.bytes; });
}

std::string Operation::to_string() const {
  return std::string(sends ? "send to" : "receive from") + " rank " + std::to_string(peer) + ", expert " +
         std::to_string(expert) + ", " +
         (parts.size() == 1 ? "tensor " + std::to_string(tensor) : std::to_string(parts.size()) + " tensors") + ", " +
         std::to_string(bytes()) + " bytes";
}

ranks::Json describe_nccl(const std::string& version, const memory::Memory& memory) {
  const auto setting = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  return {{"over", "nccl"},
          {"version", version},
          {"net", setting("NCCL_NET")},
          {"net_plugin", setting("NCCL_NET_PLUGIN")},
          {"memory", memory.describe()}};
}

}  // namespace verbatim::eplb
