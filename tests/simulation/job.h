// A job: processes that load the plugin, connect to each other and to themselves, exchange messages, or put and signal
// as the ranks of a communicator, or both, and close all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "simulation/choice.h"
#include "simulation/faults.h"
#include "simulation/messages.h"
#include "simulation/puts.h"
#include "simulation/scheduler.h"

namespace simulation {

// Of a run, in virtual time. When nothing but a process fails, the others end sooner: VERBATIM_CONNECT_TIMEOUT_S is a
// minute, and all else takes seconds.
constexpr Time kJobLimit = 300 * kSecond;
constexpr Time kLimitAfterDeath = 80 * kSecond;

struct Job {
  std::string plugin;
  std::string directory;  // of softverbs' files
  bool prints_log = false;
  std::size_t processes = 1;
  std::vector<std::size_t> ports;  // of each process, which merges them
  std::vector<ConnectionPlan> connections;
  bool uses_merged = false;   // the connections use all ports of a process
  bool has_optional = false;  // some have receives with optional completion
  std::string devices;        // one of kDevices
  PutPlan puts;               // each process is a rank
  Faults faults;
  Handle* handles = nullptr;  // for the connections, then for the ranks
  std::uint64_t order = 0;    // of the threads
};

// Drawn before the run, with less of it where that is chosen. Sets the variables of the plugin and of softverbs, too.
Job draw_job(const Choice& choice, const std::string& plugin);

Plan plan_of(const Job& job, std::uint64_t seed);

// On the first thread of a process. False, and lines on stderr: something was not as it must be.
bool run_job(const Job& job, std::size_t process);

}  // namespace simulation
