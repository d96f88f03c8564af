// Ports with a rate (SOFTVERBS_LINK_GBPS). All ports of the host share one virtual clock, in the registry. It grants
// quanta: the port that is free first in virtual time sends next, for one quantum, whatever the scheduler of the
// machine does. Requests posted while the clock is held (tools/softverbs hold) are sent in an order that depends on
// nothing but what was posted. Requests posted later enter at the virtual time at which they are posted.
#pragma once

#include <cstdint>
#include <optional>

#include "base/unique_fd.h"
#include "softverbs/host/host_registry.h"
#include "softverbs/host/settings.h"

namespace verbatim::softverbs {

// `schema` in each line of the trace: incremented when the meaning of a key changes or a key is removed.
constexpr unsigned kTraceSchema = 1;

// What a QP has sent with one grant.
struct SentQuantum {
  std::uint32_t qpn;
  std::uint32_t dest_qpn;
  std::uint32_t peer_slot;
  std::uint32_t peer_device;
  std::int32_t peer_pid;
  std::uint64_t bytes;  // 0: nothing was sent, and the fields of the peer are not used
};

// The ports of this process. Process owns it. Thread-safe.
class Link {
 public:
  Link(HostRegistry& registry, const Settings& settings) : registry_(registry), settings_(settings) {}

  // Registers the ports, and opens the trace file if SOFTVERBS_TRACE names one.
  Status start();

  // Counts the QPs of that device that have pending requests.
  void add_backlog(std::uint32_t device);
  void remove_backlog(std::uint32_t device);

  // The device that may send now. nullopt while another process's port may, or the clock is held. The grant lasts until
  // finish_grant() or return_grant().
  std::optional<std::uint32_t> acquire_grant();
  // Ends a grant that a QP has used.
  void finish_grant(std::uint32_t device, const SentQuantum& quantum);
  // Ends a grant that was not used.
  void return_grant();

  // A counter of wake-ups of this process's ports. wait() returns when it differs from `seen`, or after a timeout.
  std::uint32_t changes() const;
  void wait(std::uint32_t seen) const;

  // Number of releases so far. After each of them, arbitration begins again with the lowest QP number.
  std::uint32_t releases() const;

 private:
  void trace(std::uint32_t device, const SentQuantum& quantum, std::uint64_t start_ps, std::uint64_t arrival_ps);

  HostRegistry& registry_;
  const Settings& settings_;
  UniqueFd trace_;
};

}  // namespace verbatim::softverbs
