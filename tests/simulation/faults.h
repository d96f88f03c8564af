// What goes wrong in a run, and what the plugin may log about it. All of it is drawn from the seed, before the run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "simulation/scheduler.h"

namespace simulation {

enum class Fault : std::size_t {
  kLoss,  // packets and acknowledgements are lost
  kLate,  // packets arrive late
  kPort,  // the link of a port goes down, and mostly returns
};
constexpr std::array<const char*, 3> kFaultNames = {"loss", "late", "port"};
using FaultSet = std::set<Fault>;

// "none", or names separated by commas. Empty: one is not known.
std::optional<FaultSet> parse_faults(std::string_view list);

struct Faults {
  FaultSet kinds;
  std::vector<std::string> clauses;  // of SOFTVERBS_FAULTS, by process
  unsigned timeout = 0;              // VERBATIM_TIMEOUT; 0: the default
  unsigned reconnect_s = 0;          // VERBATIM_RECONNECT_S; 0: the default
  bool may_end_job = false;          // a call may fail, with a cause in the log

  // Of a warning of the plugin.
  bool allow(std::string_view line) const;
  bool explain(std::string_view line) const;  // as the cause of a call that fails
};

struct JobPorts {
  std::vector<std::size_t> ports;  // of each process
  bool have_lanes = true;          // all that runs between processes with several ports uses all of them
};

// `list`: what goes wrong; without a value the seed chooses.
Faults draw_faults(std::uint64_t seed, const JobPorts& job, const std::optional<FaultSet>& list);

// softverbs does not say how many packets were lost or late.
constexpr bool is_counted(Fault fault) {
  return fault > Fault::kLate;
}

// What has happened in this run, in memory that the processes share.
struct FaultCounts {
  std::array<std::uint64_t, kFaultNames.size()> happened{};
  std::uint64_t failed_processes = 0;  // of which a call has failed, as it may

  std::string describe(const FaultSet& kinds) const;  // " loss, port 2, 1 of the processes has failed calls"
};
void reset_fault_counts();  // before the run
FaultCounts fault_counts();
// Counts what a warning of the plugin shows.
void count_faults_in(std::string_view line);
void count_failed_process();

}  // namespace simulation
