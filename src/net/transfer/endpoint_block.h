// Creates the completion queues and QPs of one endpoint, or of the endpoints of a block, in slices: each call goes as
// far as its budget allows.
//
//   kReadPorts --> kCreateCqs --> kCreateQps --> kDistribute --> kComplete
//                      ^                             |
//                      +---------- kDestroy <--------+  QPs that share a CQ would have to go to different endpoints
//   any state --error, abandon()--> kDestroy --> the error
//
// Owned by a reservation or by an EndpointPlan; one thread at a time uses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/config.h"
#include "base/log.h"
#include "base/result.h"
#include "net/transfer/endpoint.h"
#include "net/transfer/verb_budget.h"
#include "verbs/handles.h"

namespace verbatim {

// The port with its current GID, LID and MTU: the addresses of a host can change while the process runs. `level`:
// of the line that says that there is no GID.
Result<Port> refresh_port(const Port& known, const Config& config, LogLevel level);

class EndpointBlock {
 public:
  // `flows[f]` endpoints of flow f on `ports` (1 to 8; QP j on port j modulo their number). On each device QP numbers
  // rise in this order: all QPs of a flow before those of the next flow; in a flow QP j of all endpoints before QP j +
  // 1. `config` must outlive this object.
  EndpointBlock(const std::vector<const Port*>& ports, const EndpointSizes& sizes, const Config& config,
                std::span<const std::size_t> flows);
  // Only destroys `unused`, in slices.
  EndpointBlock(std::vector<Endpoint> unused, const Config& config);

  // True: complete. False: to be called again. An error is final; by then all that was created is destroyed.
  Result<bool> advance(VerbBudget& budget);

  // From now on advance() destroys what was created, and then returns ECANCELED.
  void abandon();

  // When complete: the endpoints, flow by flow, with their QPs in INIT.
  std::vector<Endpoint>& endpoints() { return endpoints_; }

 private:
  enum class State : std::uint8_t { kReadPorts, kCreateCqs, kCreateQps, kDistribute, kComplete, kDestroy };
  // The QPs of an endpoint on one device share a CQ, or each QP has a CQ.
  enum class CqLayout : std::uint8_t { kPerDevice, kPerQp };

  struct Position {
    std::size_t endpoint;
    std::size_t qp;
  };
  struct Created {
    Position position;  // whose CQ the QP uses
    EndpointQp qp;
  };

  // The functions of the states return whether the state is complete.
  Result<bool> read_ports(VerbBudget& budget);
  Result<bool> create_cqs(VerbBudget& budget);
  Result<bool> create_qps(VerbBudget& budget);
  // Whether each endpoint has got its QPs.
  bool distribute();
  bool destroy(VerbBudget& budget);

  Result<EndpointQp> create_qp(const Endpoint& endpoint, std::size_t qp) const;
  void begin_destroy();

  const std::vector<const Port*> ports_;
  const EndpointSizes sizes_;
  const Config& config_;
  State state_ = State::kReadPorts;
  CqLayout layout_ = CqLayout::kPerDevice;
  std::optional<Error> error_;
  std::vector<Port> current_ports_;
  std::vector<Position> order_;  // of the QPs
  std::size_t next_ = 0;         // endpoint or position that continues
  std::vector<Endpoint> endpoints_;
  std::vector<Created> created_;  // in the order of creation; the CQs are in the endpoints
  std::vector<UniqueCq> destroyed_cqs_;
  std::vector<UniqueQp> destroyed_qps_;  // after the CQs: destroyed before them
};

}  // namespace verbatim
