// The metrics of the processes of this host; plugin/STATE.md explains each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "live/rates.h"

namespace verbatim::exporter {

// What the RMA of a process has carried: of each set of contexts and peer, all contexts together.
struct RmaKnown {
  using Key = std::pair<std::uint64_t, std::uint64_t>;  // number of the set, peer
  struct Carried {
    // Else it is in the sum of the others. This does not change as long as the set exists: counters would fall.
    bool own_series = false;
    live::RmaCounts counts = {};
  };
  std::map<Key, Carried> carried;
  std::optional<live::RmaCounts> others = {};  // since the exporter has first seen one
};

// Series are of a process, its devices and a direction, not of connections, so that their number is limited; those of a
// process that has ended are not in the next sample. RMA has series of a set of contexts and a peer, which end with the
// set; a process has a limited number of them. For one thread.
class Metrics {
 public:
  // Of more processes some of each user are shown, and the number of the others. A user also has a limited number of
  // series.
  Metrics(live::Sampler::Options options, std::size_t max_processes)
      : max_processes_(max_processes), sampler_(std::move(options)) {}

  // Takes a sample. Its text is in the format of Prometheus.
  std::string collect();

 private:
  // Sums since the exporter has first seen the process: they do not fall when a connection is closed.
  struct Totals {
    std::uint64_t bytes = 0;
    std::uint64_t messages = 0;
    live::Latencies latencies = {};
  };
  struct Carried {
    std::uint64_t bytes = 0;
    std::uint32_t messages = 0;
    live::Latencies latencies = {};
  };
  using SeriesKey = std::pair<std::string, bool>;  // device, sends
  struct Known {
    std::map<std::uint64_t, Carried> connections;  // by number
    std::map<SeriesKey, Totals> totals;
    RmaKnown rma;
  };

  static void count(Known& known, const live::ProcessView& process);

  const std::size_t max_processes_;
  live::Sampler sampler_;
  std::map<live::ProcessId, Known> known_;
};

}  // namespace verbatim::exporter
