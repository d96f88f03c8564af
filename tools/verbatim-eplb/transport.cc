#include "verbatim-eplb/transport.h"

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

}  // namespace verbatim::eplb
