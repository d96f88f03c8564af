// Creates the endpoints of a communicator's connections so that their QP numbers rise in an order that treats all peers
// alike: a NIC that serves its send queues by QP number begins with the QPs that were created first.
//
// VERBATIM_QP_ORDER=native: each connection creates its QPs when it needs them.
// VERBATIM_QP_ORDER=staggered:
//   - Each connection has a slot (flow, peer): flow is the number of earlier connections to the same peer, peer is the
//     index of the peer. QP j of the q QPs of a connection has the position (flow * q + j) * peers + peer: the first
//     QPs of all peers come before the second ones.
//   - A block is a rectangle of slots. Its QPs are created at once, in the order of their positions.
//   - If peers and flows are announced, the first request creates a block for all of them, and each request gets its
//     slot at once. More peers or flows than announced begin another block.
//   - If nothing is announced, requests wait for the end of their burst: VERBATIM_QP_GATHER_US without a request, or
//     2 ms since the first one. The connections of a burst are a block.
//   - Announced peers are indexed in the order of their first requests: NCCL announces, and it rotates its peers (rank
//     r begins with rank r + 1). If a caller did not rotate, all ranks would begin with the same peer. So the peers of
//     a burst are indexed in ring order: by identity, from the identity of this communicator on. Announced peers are,
//     too, if the requests show that the caller does not rotate: all peers are in this process (between processes
//     identities are random) and their identities rise from below the own one. Such requests wait like a burst.
//
// Slots are counted separately for each side, kind of traffic, set of ports and sizes (Plan). Nothing here waits for a
// peer. Unused endpoints are destroyed with the communicator's last connection, or when a device is full.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/mutex.h"
#include "base/result.h"
#include "net/connect/qp_planner.h"
#include "net/transfer/endpoint.h"

namespace verbatim {

class EndpointPool;

// All pools of the process. Any thread.
class EndpointPools {
 public:
  void add(EndpointPool& pool) VERBATIM_EXCLUDES(mutex_);
  void remove(EndpointPool& pool) VERBATIM_EXCLUDES(mutex_);
  // Destroys all endpoints that no connection has taken. Returns whether there were any.
  bool release_unused() VERBATIM_EXCLUDES(mutex_);

 private:
  Mutex mutex_;
  std::set<EndpointPool*> pools_ VERBATIM_GUARDED_BY(mutex_);
};

enum class QpSide : std::uint8_t { kSend, kRecv };

// What setNetAttr announces, by direction.
struct Announcement {
  Traffic send;
  Traffic recv;
};

struct EndpointRequest {
  QpSide side = QpSide::kSend;
  std::vector<const Port*> ports;
  EndpointSizes sizes;
  PeerId self;
  PeerId peer;
  Traffic traffic;
};

// A connection's request and, once it has one, its endpoint. The slot of a reservation that is dropped stays unused.
class EndpointReservation {
 public:
  explicit EndpointReservation(EndpointRequest request) : request_(std::move(request)) {}

 private:
  friend class EndpointPool;
  enum class State : std::uint8_t { kCreateAtTake, kWaiting, kReady };

  const EndpointRequest request_;
  State state_ = State::kCreateAtTake;  // written under the pool's mutex
  EndpointPlacement placement_;
  std::optional<Endpoint> endpoint_;
};

// Owned by a Context. Any thread.
class EndpointPool {
 public:
  EndpointPool(const Config& config, EndpointPools& all);
  ~EndpointPool();
  EndpointPool(const EndpointPool&) = delete;
  EndpointPool& operator=(const EndpointPool&) = delete;

  void announce(const Announcement& announcement) VERBATIM_EXCLUDES(announced_mutex_);
  // The last announcement of this thread, else of any thread: NCCL's progress thread announces the work under way, its
  // service thread the connection that it requests next.
  Traffic announced(QpSide side) const VERBATIM_EXCLUDES(announced_mutex_);

  std::shared_ptr<EndpointReservation> reserve(EndpointRequest wanted) VERBATIM_EXCLUDES(mutex_);
  // To be called until it returns an endpoint or an error: nullopt while the reservation waits for the end of its
  // burst, at most 2 ms.
  Result<std::optional<Endpoint>> take(EndpointReservation& reservation) VERBATIM_EXCLUDES(mutex_);
  // Creates the blocks of bursts that have ended. Every connect and accept that NCCL polls calls it.
  void poll() VERBATIM_EXCLUDES(mutex_);

  bool release_unused() VERBATIM_EXCLUDES(mutex_);
  // The communicator has no connection any more: the next ones start with new blocks.
  void reset_order() VERBATIM_EXCLUDES(mutex_);

 private:
  // The slots of endpoints of one kind.
  struct Plan {
    QpSide side;
    bool collective;
    std::vector<const Port*> ports;
    EndpointSizes sizes;

    std::map<PeerId, std::uint32_t> connections = {};
    bool native = false;  // the device could not create a block
    std::uint32_t native_qps = 0;
    QpPlanner planner = {};  // of announced traffic
    std::uint32_t blocks = 0;
    std::map<std::pair<std::uint32_t, std::uint32_t>, Endpoint> unused = {};  // by block and index of the slot

    std::vector<std::weak_ptr<EndpointReservation>> waiting = {};
    std::uint64_t first_request_ns = 0;  // of those that wait
    std::uint64_t last_request_ns = 0;
    std::optional<PeerId> last_peer = {};
    bool rotates = false;  // unknown until a request shows it or the first burst ends
  };
  using Reservations = std::vector<std::shared_ptr<EndpointReservation>>;

  Plan& plan_for(const EndpointRequest& request) VERBATIM_REQUIRES(mutex_);
  Traffic expected_traffic(const EndpointRequest& request) const;
  BlockShape announced_shape(const EndpointRequest& request) const;
  // Assigns slots to all reservations that wait, and creates the blocks that are missing.
  void end_burst(Plan& plan) VERBATIM_REQUIRES(mutex_);
  std::vector<QpSlot> assign_slots(Plan& plan, const Reservations& reservations, const BlockShape& announced)
      VERBATIM_REQUIRES(mutex_);
  void create_block(Plan& plan, const QpBlock& block, std::vector<std::uint32_t> slots) VERBATIM_REQUIRES(mutex_);
  void end_due_bursts() VERBATIM_REQUIRES(mutex_);

  const Config& config_;
  EndpointPools& all_;
  mutable Mutex announced_mutex_;
  std::map<std::thread::id, Announcement> announced_ VERBATIM_GUARDED_BY(announced_mutex_);
  Announcement last_announced_ VERBATIM_GUARDED_BY(announced_mutex_);
  Mutex mutex_;
  std::vector<std::unique_ptr<Plan>> plans_ VERBATIM_GUARDED_BY(mutex_);
};

// Queue pairs that one block may have.
std::size_t max_block_qps(std::span<const Port* const> ports);

}  // namespace verbatim
