// Creates the endpoints of a communicator's connections so that their QP numbers rise in an order that treats all peers
// alike: a NIC that serves its send queues by QP number begins with the QPs that were created first.
//
// VERBATIM_QP_ORDER=native: each connection creates its QPs when it needs them.
// VERBATIM_QP_ORDER=staggered:
//   - Each connection has a slot (flow, peer): the number of earlier connections to the same peer, and the index of the
//     peer. QP j of its q QPs has the position (flow * q + j) * peers + peer: the first QPs of all peers come first.
//   - A block is a rectangle of slots. Its QPs are created in the order of their positions, one block after the other,
//     in slices (VerbBudget): by each call of a connection that waits for a block. When all QPs of a block exist, its
//     connections get theirs.
//   - If peers and flows are announced, the first request creates a block for all of them, and each request gets its
//     slot at once. More peers or flows than announced begin another block.
//   - If nothing is announced, the connections of a burst are a block: requests wait for VERBATIM_QP_GATHER_US without
//     a request, or 2 ms since the first one.
//   - Announced peers are indexed in the order of their first requests, because NCCL rotates its peers (rank r begins
//     with rank r + 1). The peers of a burst are indexed in ring order: by identity, from the own one on.
//   - If the requests show that the caller does not rotate, announced peers are indexed in ring order too, and wait
//     like a burst. The caller does not rotate if all peers are in this process (between processes identities are
//     random) and their identities rise from below the own one.
//
// Slots are counted separately for each direction, kind of traffic, set of ports and sizes (EndpointPlan). A device
// that hangs while it creates or destroys QPs delays only connections that use it. Nothing here waits for a peer.
// Unused endpoints, and blocks for which no connection waits any more, are destroyed with the communicator's last
// connection, or when their device is full. What connect and accept destroy counts in their VerbBudget.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "base/config.h"
#include "base/mutex.h"
#include "base/result.h"
#include "net/connect/qp_planner.h"
#include "net/transfer/comm.h"
#include "net/transfer/endpoint.h"

namespace verbatim {

class EndpointPlan;
// A connection's request and, once it has one, its endpoint. The slot of a reservation that is dropped stays unused.
struct EndpointReservation;

// The plans of all pools of the process. Any thread.
class EndpointPools {
 public:
  void add(const std::shared_ptr<EndpointPlan>& plan) VERBATIM_EXCLUDES(mutex_);
  // Releases all QPs on the devices of `ports` that no connection has taken or waits for. Returns whether there are
  // any to be destroyed.
  bool release_unused(std::span<const Port* const> ports) VERBATIM_EXCLUDES(mutex_);
  // Destroys what is released on these devices, as far as the budget allows. False: to be called again.
  bool destroy_released(std::span<const Port* const> ports, VerbBudget& budget) VERBATIM_EXCLUDES(mutex_);

 private:
  std::vector<std::shared_ptr<EndpointPlan>> plans_using(std::span<const Port* const> ports) VERBATIM_EXCLUDES(mutex_);

  Mutex mutex_;
  std::vector<std::weak_ptr<EndpointPlan>> plans_ VERBATIM_GUARDED_BY(mutex_);
};

// What setNetAttr announces.
struct Announcement {
  AnnouncedFlows send;
  AnnouncedFlows recv;
};

struct EndpointRequest {
  CommKind kind = CommKind::kSend;
  std::vector<const Port*> ports;
  EndpointSizes sizes;
  wire::PeerIdentity self;
  wire::PeerIdentity peer;
  AnnouncedFlows announced;
};

// Owned by a Context. Any thread.
class EndpointPool {
 public:
  EndpointPool(const Config& config, EndpointPools& all) : config_(config), all_(all) {}
  EndpointPool(const EndpointPool&) = delete;
  EndpointPool& operator=(const EndpointPool&) = delete;

  void announce(const Announcement& announcement) VERBATIM_EXCLUDES(mutex_);
  // The last announcement of this thread, else of any thread: NCCL's progress thread announces the work under way, its
  // service thread the connection that it requests next.
  AnnouncedFlows announced(CommKind kind) const VERBATIM_EXCLUDES(mutex_);

  std::shared_ptr<EndpointReservation> reserve(EndpointRequest wanted) VERBATIM_EXCLUDES(mutex_);
  // To be called until it returns an endpoint or an error: nullopt while the reservation waits for the end of its
  // burst, at most 2 ms, or for the QPs of its block. Leaves one verb for each port: the caller registers memory there.
  Result<std::optional<Endpoint>> take(EndpointReservation& reservation, VerbBudget& budget);

  // The communicator has no connection any more: the next ones start with new blocks.
  void reset_order() noexcept VERBATIM_EXCLUDES(mutex_);

 private:
  Result<std::optional<Endpoint>> take_endpoint(EndpointReservation& reservation, VerbBudget& budget);

  const Config& config_;
  EndpointPools& all_;
  mutable Mutex mutex_;  // held only for a moment: not while QPs are created or destroyed
  std::map<std::thread::id, Announcement> announced_ VERBATIM_GUARDED_BY(mutex_);
  Announcement last_announced_ VERBATIM_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<EndpointPlan>> plans_ VERBATIM_GUARDED_BY(mutex_);
};

// Queue pairs that one block may have.
std::size_t max_block_qps(std::span<const Port* const> ports);

}  // namespace verbatim
