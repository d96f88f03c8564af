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
#include "net/endpoint.h"
#include "net/qp_planner.h"

namespace verbatim {

class EndpointPool;

// All pools of the process. Any thread.
class EndpointPools {
 public:
  void add(EndpointPool& pool) VERBATIM_EXCLUDES(mutex_);
  void remove(EndpointPool& pool) VERBATIM_EXCLUDES(mutex_);
  // Destroys all endpoints that wait to be used; whether there were any.
  bool release_idle() VERBATIM_EXCLUDES(mutex_);

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

struct EndpointWish {
  QpSide side = QpSide::kSend;
  std::vector<const Port*> ports;
  EndpointSizes sizes;
  PeerId self;
  PeerId peer;
  Traffic traffic;
};

// A connection's place. Dropped without a take, it leaves the place empty.
class EndpointClaim {
 public:
  explicit EndpointClaim(EndpointWish wish) : wish_(std::move(wish)) {}

 private:
  friend class EndpointPool;
  enum class State : std::uint8_t { kMadeAtTake, kGathered, kReady };

  const EndpointWish wish_;
  State state_ = State::kMadeAtTake;  // written under the pool's mutex
  EndpointPlace place_;
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

  std::shared_ptr<EndpointClaim> claim(EndpointWish wish) VERBATIM_EXCLUDES(mutex_);
  // Once, until it answers an endpoint or an error: nothing while its burst is still being gathered, at most 2 ms.
  Result<std::optional<Endpoint>> take(EndpointClaim& claim) VERBATIM_EXCLUDES(mutex_);
  // Makes what has been gathered for long enough. From every connect and accept that waits, whosever connection it is.
  void poll() VERBATIM_EXCLUDES(mutex_);

  bool release_idle() VERBATIM_EXCLUDES(mutex_);
  // No connection is left: the next ones begin a new order.
  void forget() VERBATIM_EXCLUDES(mutex_);

 private:
  // Endpoints of one kind, which are ordered among themselves.
  struct Line {
    QpSide side;
    bool collective;
    std::vector<const Port*> ports;
    EndpointSizes sizes;

    std::map<PeerId, std::uint32_t> connections = {};
    bool native = false;  // the device had no room
    std::uint32_t native_qps = 0;
    QpPlanner planner = {};
    std::vector<std::vector<std::optional<Endpoint>>> layers = {};  // of the planner, row by row
    std::vector<std::weak_ptr<EndpointClaim>> gathered = {};
    std::uint64_t gathered_first_ns = 0;
    std::uint64_t gathered_last_ns = 0;
    std::uint32_t bursts = 0;
  };

  Line& line_of(const EndpointWish& wish) VERBATIM_REQUIRES(mutex_);
  void take_from_pool(Line& line, EndpointClaim& claim) VERBATIM_REQUIRES(mutex_);
  void make_gathered(Line& line) VERBATIM_REQUIRES(mutex_);
  void make_due() VERBATIM_REQUIRES(mutex_);
  Traffic expected(const EndpointWish& wish) const;
  void give_up(Line& line, std::size_t endpoints, const Error& error) VERBATIM_REQUIRES(mutex_);

  const Config& config_;
  EndpointPools& all_;
  mutable Mutex announced_mutex_;
  std::map<std::thread::id, Announcement> announced_ VERBATIM_GUARDED_BY(announced_mutex_);
  Announcement last_announced_ VERBATIM_GUARDED_BY(announced_mutex_);
  Mutex mutex_;
  std::vector<std::unique_ptr<Line>> lines_ VERBATIM_GUARDED_BY(mutex_);
};

// Queue pairs that one block of the pool may have.
std::size_t most_block_qps(std::span<const Port* const> ports);

}  // namespace verbatim
