#include "net/context/forecast.h"

#include <unistd.h>

#include "net/transfer/recv_comm.h"
#include "net/transfer/send_comm.h"

namespace verbatim {
namespace {

// A registration locks whole pages.
std::size_t whole_pages(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
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
          .descriptors = 2 * flows + wire::kMaxAddresses};  // side channels, and at most so many of the listener
}

}  // namespace verbatim
