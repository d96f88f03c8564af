// A communicator of RMA at one rank: the channels to all other ranks, its contexts and its registrations.
//
// Threads: connect, create_contexts and register_memory block until the other ranks make the same call; one of them at
// a time. They may run while another thread uses a context. The loop's thread reads what the other ranks send.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/config.h"
#include "base/mutex.h"
#include "base/result.h"
#include "net/monitor/monitor.h"
#include "net/transfer/memory.h"
#include "rma/context_setup.h"
#include "rma/failures.h"
#include "rma/memory.h"
#include "rma/peer_ranks.h"
#include "rma/stall_watch.h"
#include "verbs/port.h"

namespace verbatim::rma {

class Instance;

// What an instance gives its communicators; it outlives them.
struct CollSettings {
  const Config& config;
  const std::string& host_name;
  Monitor& monitor;
  Registrations<Memory>& memories;
  unsigned max_recvs = 1;
  Instance& owner;
};

// That of the device, then those with which it shares its lanes.
struct LanePorts {
  std::vector<const Port*> ports;
  // Why other devices are left out, behind a line about lanes; empty: they are not.
  const char* why_one_device = "";
};

class CollComm {
 public:
  // Takes over the connections that a handshake has made. Collective.
  static Result<std::unique_ptr<CollComm>> create(const CollSettings& settings, LanePorts ports,
                                                  std::vector<PeerRank> peers, std::uint32_t rank);
  ~CollComm();
  CollComm(const CollComm&) = delete;
  CollComm& operator=(const CollComm&) = delete;

  Instance& owner() const { return settings_.owner; }

  // Collective. An error has been logged.
  Result<ContextSet*> create_contexts(const ContextSetupRequest& request) VERBATIM_EXCLUDES(mutex_);
  // Waits for outstanding work, at most VERBATIM_CLOSE_TIMEOUT_MS. The QPs stay as long after it, because a peer may
  // still wait for an acknowledgement, and its own work for them.
  void destroy_contexts(ContextSet& set) VERBATIM_EXCLUDES(mutex_);

  // Collective: all ranks get their memory, or none does. After a failed registration as dma-buf the caller tries
  // again, in another way; if the buffer of another rank was the cause, that second call fails at once.
  Result<Memory*> register_memory(const MrRequest& request) VERBATIM_EXCLUDES(mutex_);

  // Tells the other ranks that nothing more comes. False: there was a failure or outstanding work, and nobody needs the
  // QPs any more.
  bool begin_close() VERBATIM_EXCLUDES(mutex_);
  bool all_ended() const { return ranks_.all_ended(); }
  const char* why_one_device() const { return why_one_device_; }  // see LanePorts
  void wait_for_ends(std::uint64_t deadline_ns) const { ranks_.wait_for_ends(deadline_ns); }

 private:
  struct CreatedSet {
    std::unique_ptr<ContextSet> set;
    std::unique_ptr<StallWatch> watch = nullptr;  // of a set in use
    std::uint64_t destroyed_ns = 0;               // 0: in use
  };
  struct Buffer {
    const void* address = nullptr;
    std::size_t bytes = 0;
    bool operator==(const Buffer&) const = default;
  };

  CollComm(const CollSettings& settings, LanePorts ports, std::vector<PeerRank> peers, std::uint32_t rank);

  Status prepare();
  // From the exchange of connect: how many ports each rank has. An error has been logged.
  Status read_port_counts(const std::vector<wire::RmaExchange>& received);
  // The loop's thread.
  void channel_changed(const PeerRank& peer) noexcept;
  void pass_on_lanes(const PeerRank& peer) VERBATIM_EXCLUDES(lanes_mutex_);
  void pass_on(std::uint32_t rank, const wire::RmaLane& message) VERBATIM_REQUIRES(lanes_mutex_);
  void add_lanes(ContextSet& set) VERBATIM_EXCLUDES(lanes_mutex_);
  void peer_ended(const PeerRank& peer) noexcept;
  void tell_failure(const std::string& text);
  // A collective call that ends with an exception fails the communicator, because the others may have succeeded.
  Error fail_exception(const char* call) noexcept;
  void remove_destroyed() VERBATIM_REQUIRES(mutex_);
  std::uint64_t close_timeout_ns() const { return settings_.config.close_timeout_ms * kNanosecondsPerMillisecond; }
  Result<std::vector<wire::RmaExchange>> exchange_registration(const Result<std::unique_ptr<MemoryHandle>>& own,
                                                               const MrRequest& request) VERBATIM_REQUIRES(mutex_);
  // Exchanges the registration of this rank for those of the others.
  Result<std::unique_ptr<Memory>> complete(Result<std::unique_ptr<MemoryHandle>> registered, const MrRequest& request)
      VERBATIM_REQUIRES(mutex_);

  const CollSettings settings_;
  const std::vector<const Port*> ports_;
  const char* const why_one_device_;
  std::vector<std::uint8_t> port_counts_;  // by rank
  PeerRanks ranks_;
  Failures failures_;
  std::optional<ControlMemory> scratch_;
  std::atomic<std::size_t> contexts_in_use_{0};
  mutable Mutex mutex_;  // held during collective calls
  std::vector<CreatedSet> sets_ VERBATIM_GUARDED_BY(mutex_);
  std::uint32_t sets_made_ VERBATIM_GUARDED_BY(mutex_) = 0;
  Mutex lanes_mutex_;
  std::map<std::uint32_t, ContextSet*> lanes_of_ VERBATIM_GUARDED_BY(lanes_mutex_);  // sets with several, by number
  std::uint32_t newest_lanes_ VERBATIM_GUARDED_BY(lanes_mutex_) = 0;                 // later sets are not made yet
  // What peers have sent about sets that this rank has not finished.
  std::map<std::uint32_t, std::vector<wire::RmaLane>> early_ VERBATIM_GUARDED_BY(lanes_mutex_);  // by rank
  // A buffer whose registration as dma-buf has failed: the other ranks wait for the second call.
  std::optional<Buffer> repeats_ VERBATIM_GUARDED_BY(mutex_);
  // A buffer whose registration as dma-buf has failed at all ranks, and why at this one.
  std::optional<std::pair<Buffer, Error>> refused_ VERBATIM_GUARDED_BY(mutex_);
  std::uint32_t gpu_atomics_ VERBATIM_GUARDED_BY(mutex_) = 0;  // ports that execute them, one bit each
};

}  // namespace verbatim::rma
