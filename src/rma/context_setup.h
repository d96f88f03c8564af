// createContext: makes the QPs of all contexts to all peers, tells each peer its QPs, and connects them. Collective: a
// rank where a step fails tells the others, so that it fails at all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "rma/context_set.h"

namespace verbatim::rma {

struct ContextSetupRequest {
  int contexts = 0;
  int traffic_class = -1;
  int rank_stride = 1;  // only ranks at multiples of it from oneself are spoken to
};

class ContextSetup {
 public:
  // `known_port`: of the inventory; parts.port is replaced by it as it is now.
  ContextSetup(const ContextSetupRequest& request, const Port& known_port, ContextSetParts parts);

  // Blocks until all ranks have done the same. An error has been logged.
  Result<std::unique_ptr<ContextSet>> run();

 private:
  // The functions return an error that may not be logged yet.
  Status check_request();
  Status create();
  Status create_queues();
  void prepare(PeerQueue& queue, RcQp& made);
  // `distance`: of the rank in ring order, from 0.
  std::vector<std::uint8_t> offer_for(std::size_t distance) const;
  Status read_offers(const std::vector<wire::RmaExchange>& received);
  void read_offer(const wire::RmaOffer& offer, const PeerRank& rank, PeerPath& path) const;
  Status connect();
  // Gives the outcome of this rank to the others. An error, of this rank or of another one, has been logged.
  Result<std::vector<wire::RmaExchange>> exchange(wire::RmaCall call, const Status& own);
  Error log_failure(const Error& error) const;
  void log_success() const;
  // For VERBATIM_QP_DUMP.
  void dump_queues() const;

  std::uint32_t slots_of(bool to_oneself) const;
  std::uint32_t work_of(bool to_oneself) const;

  const ContextSetupRequest request_;
  const Port& known_port_;
  ContextSetParts parts_;
  std::vector<std::uint32_t> peers_;  // ranks that are spoken to, in ring order
  std::unique_ptr<ContextSet> set_;
  std::vector<wire::RmaOffer> offers_;  // by peer
  std::string failed_step_;             // for messages
};

}  // namespace verbatim::rma
