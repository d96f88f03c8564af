// SOFTVERBS_LINK_GBPS: ports with a rate. All ports of the host share one virtual clock, in the registry, and take
// turns in its order: the port that is free first sends next, for one quantum, whoever's core runs first. So what was
// posted while the clock was held (tools/softverbs hold) is sent in an order that depends on nothing but what was
// posted; what is posted later is stamped with the time at which it arrives.
#pragma once

#include <cstdint>
#include <optional>

#include "base/unique_fd.h"
#include "softverbs/host/host_registry.h"
#include "softverbs/host/settings.h"

namespace verbatim::softverbs {

struct Qp;

// The ports of this process. Thread-safe.
class Link {
 public:
  Link(HostRegistry& registry, const Settings& settings) : registry_(registry), settings_(settings) {}

  // Enters the ports, and opens the trace if one is wanted.
  Status start();

  // A QP of that device has something to send, or no longer.
  void add_backlog(std::uint32_t device);
  void remove_backlog(std::uint32_t device);

  // The device whose turn it is; nothing while it is another process's, or the clock is held. The turn lasts until
  // end_turn().
  std::optional<std::uint32_t> acquire_grant();
  // The QP has sent so many bytes.
  void finish_grant(std::uint32_t device, const Qp& qp, std::uint64_t bytes);

  void return_grant();

  // Grows with every turn and every change from outside; wait() returns when it is no longer `seen`, or soon.
  std::uint32_t changes() const;
  void wait(std::uint32_t seen) const;

  // Of the releases so far: every one begins a new round.
  std::uint32_t releases() const;

 private:
  void trace(std::uint32_t device, const Qp& qp, std::uint64_t bytes, std::uint64_t start_ps, std::uint64_t arrival_ps);

  HostRegistry& registry_;
  const Settings& settings_;
  UniqueFd trace_;
};

}  // namespace verbatim::softverbs
