// createContext: makes the QPs of all contexts to all peers, tells each peer its QPs, and connects them. Collective: a
// rank where a step fails tells the others, so that it fails at all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "rma/context_set.h"
#include "rma/queue_order.h"

namespace verbatim::rma {

struct ContextSetupRequest {
  int contexts = 0;
  int traffic_class = -1;
  int rank_stride = 1;  // only ranks at multiples of it from oneself are spoken to
};

class ContextSetup {
 public:
  // `known_ports`: of the inventory, the first is that of the device; parts.ports become these as they are now.
  ContextSetup(const ContextSetupRequest& request, std::span<const Port* const> known_ports, ContextSetParts parts);

  // Blocks until all ranks have done the same. An error has been logged.
  Result<std::unique_ptr<ContextSet>> run();

 private:
  // The functions return an error that may not be logged yet.
  Status check_request();
  Status create();
  Status create_cqs();
  Status create_queues();
  // The QPs of the other lanes.
  Status create_further_queues(const std::vector<QueuePosition>& order);
  Result<RcQp> create_queue(const Port& port, bool to_oneself);
  ibv_cq* cq_of(const Port& port) const;
  // How many lanes there are to a peer: as many as the end with more ports has ports.
  std::uint32_t lanes_to(std::size_t peer) const;
  // Of the first packet that the QPs of a peer expect.
  std::uint32_t psn_of(std::uint32_t peer) const;
  void prepare(PeerQueue& queue, RcQp& made);
  wire::RmaOfferedLane offer_lane(std::uint32_t lane, std::uint32_t peer) const;
  // `distance`: of the rank in ring order, from 0.
  std::vector<std::uint8_t> offer_for(std::size_t distance) const;
  Status read_offers(const std::vector<wire::RmaExchange>& received);
  LanePath read_lane(const wire::RmaOfferedLane& offer, const Port& port, const PeerRank& rank) const;
  Status connect();
  // The ports of the lane are up here.
  Status connect_lane(const LaneQp& own, std::uint64_t deadline_ns);
  // Of a set with several lanes: a QP for each context and port.
  Status create_flush_queues();
  bool has_several_lanes() const;
  void leave_out_unknown();
  void prepare_failover();
  // Gives the outcome of this rank to the others. An error, of this rank or of another one, has been logged.
  Result<std::vector<wire::RmaExchange>> exchange(wire::RmaCall call, const Status& own);
  Error log_failure(const Error& error) const;
  void log_success() const;
  // For VERBATIM_QP_DUMP.
  void dump_queues() const;

  std::uint32_t slots_of(bool to_oneself) const;
  std::uint32_t work_of(bool to_oneself) const;

  const ContextSetupRequest request_;
  const std::span<const Port* const> known_ports_;
  ContextSetParts parts_;
  std::vector<std::uint32_t> peers_;  // ranks that are spoken to, in ring order
  std::unique_ptr<ContextSet> set_;
  std::vector<const char*> unusable_;  // by port, the reason; nullptr: it can be used
  // Lanes that could not be connected now.
  struct FailedLane {
    std::uint32_t peer = 0;
    std::uint32_t lane = 0;
    std::uint32_t connected = 0;  // QPs
    Error error;
  };
  std::vector<FailedLane> failed_lanes_;
  std::string failed_step_;               // for messages
  std::optional<PathFacts> failed_path_;  // of QPs that could not be connected
};

}  // namespace verbatim::rma
