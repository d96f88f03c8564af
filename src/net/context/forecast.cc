#include "net/context/forecast.h"

#include <unistd.h>

#include <algorithm>
#include <vector>

#include "base/socket_interface.h"
#include "net/transfer/recv_comm.h"
#include "net/transfer/send_comm.h"
#include "wire/limits.h"

namespace verbatim {
namespace {

// A registration locks whole pages.
std::size_t whole_pages(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

std::size_t listening_sockets(const Config& config) {
  const Result<std::vector<SocketInterface>> interfaces = list_socket_interfaces();
  if (!interfaces) return 1;
  return std::min(all_socket_interfaces(*interfaces, config.socket_ifname.value, config.socket_family).size(),
                  wire::kMaxAddresses);
}

}  // namespace

Forecast forecast(const Config& config, std::size_t ports, std::size_t flows, const AnnouncedFlows& announced) {
  if (flows == 0) return {};
  const std::size_t qps = SendComm::endpoint_sizes(ports, choose_qps(config.qps_per_connection, announced), config).qps;
  const std::size_t control = whole_pages(SendComm::control_bytes(ports)) +
                              whole_pages(RecvComm::control_bytes(ports, config.completion == Completion::kAtomic));
  return {.connections = 2 * flows,
          .qps = 2 * flows * qps,
          .flush_qps = flows * ports,
          .memory_regions = 2 * flows * ports,
          .registered_bytes = flows * ports * control,
          .descriptors = 2 * flows + listening_sockets(config)};  // the side channels, and the listener's
}

}  // namespace verbatim
