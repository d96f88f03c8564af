// The endpoints that a communicator's connections will use, made in the order of net/qp_planner.h: beforehand and many
// at once (pool), when a burst of connections has been gathered (gather, ring), or one by one (native). A connection
// says at its first call what it will need, which fixes its place, and takes its endpoint when that is made. Nothing
// here waits for a peer. An endpoint is used once: what is left over goes when the communicator has no connection any
// more, or when somebody else finds the device full.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
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
  // Destroys all endpoints that wait to be used; whether there were any.
  bool release_unused() VERBATIM_EXCLUDES(mutex_);

 private:
  Mutex mutex_;
  std::set<EndpointPool*> pools_ VERBATIM_GUARDED_BY(mutex_);
};

enum class QpSide : std::uint8_t { kSend, kRecv };

// What setNetAttr says of connections that follow, by direction.
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

// A connection's place. Dropped without a take, it leaves the place empty.
class EndpointReservation {
 public:
  explicit EndpointReservation(EndpointRequest request) : request_(std::move(request)) {}

 private:
  friend class EndpointPool;
  enum class State : std::uint8_t { kCreateAtTake, kGathered, kReady };

  const EndpointRequest request_;
  State state_ = State::kCreateAtTake;  // written under the pool's mutex
  EndpointPlacement placement_;
  std::optional<Endpoint> endpoint_;
};

// Of one Context. Any thread.
class EndpointPool {
 public:
  EndpointPool(const Config& config, EndpointPools& all);
  ~EndpointPool();
  EndpointPool(const EndpointPool&) = delete;
  EndpointPool& operator=(const EndpointPool&) = delete;

  void announce(const Announcement& announcement) VERBATIM_EXCLUDES(announced_mutex_);
  // What this thread has announced last, else any thread: NCCL's progress thread announces the work under way, its
  // service thread the connection that it is about to ask for.
  Traffic announced(QpSide side) const VERBATIM_EXCLUDES(announced_mutex_);

  std::shared_ptr<EndpointReservation> reserve(EndpointRequest request) VERBATIM_EXCLUDES(mutex_);
  // Once, until it answers an endpoint or an error: nothing while its burst is still being gathered, at most 2 ms.
  Result<std::optional<Endpoint>> take(EndpointReservation& claim) VERBATIM_EXCLUDES(mutex_);
  // Makes what has been gathered for long enough. From every connect and accept that waits, whosever connection it is.
  void poll() VERBATIM_EXCLUDES(mutex_);

  bool release_unused() VERBATIM_EXCLUDES(mutex_);
  // No connection is left: the next ones begin a new order.
  void reset_order() VERBATIM_EXCLUDES(mutex_);

 private:
  // Endpoints of one kind, which are ordered among themselves.
  struct Partition {
    QpSide side;
    bool collective;
    std::vector<const Port*> ports;
    EndpointSizes sizes;

    std::map<PeerId, std::uint32_t> connections = {};
    bool native = false;  // the device had no room
    std::uint32_t native_qps = 0;
    QpPlanner planner = {};
    std::vector<std::vector<std::optional<Endpoint>>> layers = {};  // of the planner, row by row
    std::vector<std::weak_ptr<EndpointReservation>> gathered = {};
    std::uint64_t gathered_first_ns = 0;
    std::uint64_t gathered_last_ns = 0;
    std::uint32_t burst_count = 0;
  };

  Partition& partition_for(const EndpointRequest& request) VERBATIM_REQUIRES(mutex_);
  void take_from_block(Partition& partition, EndpointReservation& claim) VERBATIM_REQUIRES(mutex_);
  void create_gathered(Partition& partition) VERBATIM_REQUIRES(mutex_);
  void create_due() VERBATIM_REQUIRES(mutex_);
  Traffic expected_traffic(const EndpointRequest& request) const;
  void fall_back_to_native(Partition& partition, std::size_t endpoints, const Error& error) VERBATIM_REQUIRES(mutex_);

  const Config& config_;
  EndpointPools& all_;
  mutable Mutex announced_mutex_;
  std::map<std::thread::id, Announcement> announced_ VERBATIM_GUARDED_BY(announced_mutex_);
  Announcement last_announced_ VERBATIM_GUARDED_BY(announced_mutex_);
  Mutex mutex_;
  std::vector<std::unique_ptr<Partition>> partitions_ VERBATIM_GUARDED_BY(mutex_);
};

// Queue pairs that one block of the pool may have.
std::size_t max_block_qps(std::span<const Port* const> ports);

}  // namespace verbatim
