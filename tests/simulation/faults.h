// What goes wrong in a run, and what the plugin may log about it. All of it is drawn from the seed, before the run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "simulation/scheduler.h"
#include "simulation/tcp_faults.h"

namespace simulation {

enum class Fault : std::size_t {
  kLoss,        // packets and acknowledgements are lost
  kLate,        // packets arrive late
  kPort,        // the link of a port goes down, and mostly returns
  kReset,       // TCP connections are reset
  kUnanswered,  // nothing arrives any more over a TCP connection
  kRefused,     // TCP connections to a process are refused for some time
  kCut,         // nothing arrives over TCP at an interface of a process for some time, or for ever
  kDeath,       // a process ends as if it were killed
  kVerb,        // a call of a verb is refused, also that of a registration
  kHang,        // a call of a verb takes seconds
  kMemory,      // a call of the plugin for memory is refused
  kAbort,       // the application of a process closes all that it has, as ncclCommAbort does
  kGid,         // the GID table of a port changes, with its link or without
  kQp,          // a work request or a device of a process fails, not because of the network
  kIdle,        // the application of a process makes no calls for some time
};
constexpr std::array kFaultNames = {"loss", "late", "port",   "reset", "unanswered", "refused", "cut", "death",
                                    "verb", "hang", "memory", "abort", "gid",        "qp",      "idle"};
// A process ends early, and all else works.
constexpr bool is_of_process(Fault fault) {
  return fault == Fault::kDeath || fault == Fault::kAbort;
}
using FaultSet = std::set<Fault>;

// Of the events of a fault only these happen, counted from 1 in the order in which they are drawn; of a fault that is
// not here, all.
using FaultEvents = std::map<Fault, std::set<std::size_t>>;
struct ChosenFaults {
  FaultSet kinds = {};
  FaultEvents events = {};

  bool operator==(const ChosenFaults&) const = default;
};

// "none", or names separated by commas, each with the numbers of its events where not all happen: "loss,port/1/3".
// Empty: one is not known.
std::optional<ChosenFaults> parse_faults(std::string_view list);
std::string describe(const ChosenFaults& faults);

struct Faults {
  FaultSet kinds;
  std::map<Fault, std::size_t> events;  // how many were drawn
  std::vector<std::string> clauses;     // of SOFTVERBS_FAULTS, by process
  bool renumbers_gids = false;          // SOFTVERBS_GID_TABLE: a link that returns has its GIDs at other indices
  bool names_gid = false;               // VERBATIM_GID_INDEX: 3, which may be empty then
  unsigned timeout = 0;                 // VERBATIM_TIMEOUT; 0: the default
  unsigned reconnect_s = 0;             // VERBATIM_RECONNECT_S; 0: the default
  unsigned keepalive_s = 0;             // VERBATIM_KEEPALIVE_S; 0: the default
  unsigned stall_warn_s = 0;            // VERBATIM_STALL_WARN_S; 0: the default
  unsigned stall_fail_s = 0;            // VERBATIM_STALL_FAIL_S, in place of VERBATIM_STALL_WARN_S; 0: the defaults
  std::vector<Time> pauses;             // what a job exchanges has one more part, and each one begins at its time
  TcpFaults tcp;
  std::array<std::uint64_t, kMostProcessesThatDie> dies_at{};  // as Plan has it
  // When the application of a process goes on to close all: at a time, or when so many of its messages, puts, signals
  // and gets are done; 0: not.
  struct Abort {
    Time at = 0;
    std::uint64_t after = 0;
  };
  std::array<Abort, kMostProcessesThatDie> aborts{};  // by process
  // The nth call of this verb in this process returns an error.
  struct RefusedVerb {
    const char* name = nullptr;
    std::size_t process = 0;
    long nth = 0;
    int error = 0;
  };
  RefusedVerb verb;
  // A work request of this process, one of its receives or one of its devices fails.
  struct FailedQp {
    std::size_t process = SIZE_MAX;
    std::vector<std::string> causes = {};  // parts of warnings of this process or about it
    const char* at_sender = nullptr;       // of a receive: such a part
  };
  FailedQp qp;
  // The application of this process, while it exchanges.
  struct Idle {
    std::size_t process = SIZE_MAX;
    Time begin = 0;
    Time end = 0;
  };
  Idle idle;
  // As refuse_memory has it; 0: not.
  struct RefusedMemory {
    std::size_t process = 0;
    long nth = 0;
  };
  RefusedMemory memory;
  // What may fail, with a cause in the log: all, or what is not connected yet, or the RMA communicator.
  bool may_end_job = false;
  bool may_end_setup = false;
  bool may_end_puts = false;
  bool may_end_contexts = false;  // of RMA, while they are created: at a process none of its ports works

  // Of `count` messages or operations of a thread, at the earliest.
  Time begin_of(std::size_t number, std::size_t count) const;
  // Before a thread of an application makes calls.
  void wait_while_idle() const;
  bool has_aborted(std::size_t process) const;
  bool has_aborted_any() const;
  // Whether it has died or aborted in this run.
  bool has_lost(std::size_t process) const {
    return has_aborted(process) || (kinds.contains(Fault::kDeath) && death_of(process) != kNever);
  }
  bool has_lost_any() const;
  // Whether its QPs may be gone while others post to them, which may not know.
  bool has_left(std::size_t process) const;
  bool may_be_unheard() const;
  // An end may have failed or left, and another one waits for a lane to it, because it cannot know that.
  bool has_unheard() const;
  bool must_lanes_return() const;
  // Whether a warning says that the QP or the device has failed.
  bool names_failed_qp(std::string_view line) const;
  // At the begin of a process.
  bool may_leave_no_port() const { return kinds.contains(Fault::kPort) || kinds.contains(Fault::kGid); }
  // Then what is connected may find that its addresses have gone, until it has worked.
  bool may_change_gids() const { return kinds.contains(Fault::kGid); }
  // Of a warning of the plugin.
  bool allow(std::string_view line) const;
  bool explain(std::string_view line) const;  // as the cause of a call that fails
};

// Beside those of the first processes.
void leave_out(Faults& faults, std::size_t processes);

struct JobPorts {
  std::vector<std::size_t> ports;  // of each process
  bool have_lanes = true;          // all that runs between processes with several ports uses all of them
  bool has_optional = false;       // some receives have optional completion
};

// `list`: what goes wrong; without a value the seed chooses.
Faults draw_faults(std::uint64_t seed, const JobPorts& job, const std::optional<ChosenFaults>& list);

// softverbs does not say how many packets were lost or late, and which call took longer.
constexpr bool is_counted(Fault fault) {
  return fault > Fault::kLate && fault != Fault::kHang;
}

// What has happened in this run, in memory that the processes share.
struct FaultCounts {
  std::array<std::uint64_t, kFaultNames.size()> happened{};
  std::uint64_t failed_processes = 0;  // of which a call has failed, as it may

  std::string describe(const FaultSet& kinds) const;  // " loss, port 2, 1 of the processes has failed calls"
};
void reset_fault_counts();  // before the run
void count_fault(Fault fault);
FaultCounts fault_counts();
// Counts what a warning of the plugin shows.
void count_faults_in(std::string_view line);
void count_failed_process();
// A connection of this process has failed, as it may, and all calls for its connections have been made: its finalize
// ends those that it has closed at once.
void note_end_at_once();
bool ends_at_once(std::size_t process);
// The rank of this process closes while others may put to it, because one has aborted and so it waits no more for
// signals, or with requests under way that may have no lane.
void note_early_close();
bool has_closed_early(std::size_t process);
// A message, put, signal or get of this process is done.
void count_done();

}  // namespace simulation
