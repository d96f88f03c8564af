// A job: processes that load the plugin, connect to each other and to themselves, exchange messages, or put and signal
// as the ranks of a communicator, or both, and close all.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "simulation/messages.h"
#include "simulation/puts.h"
#include "simulation/scheduler.h"

namespace simulation {

// Of a run, in virtual time.
constexpr Time kJobLimit = 300 * kSecond;

struct Job {
  std::string plugin;
  bool prints_log = false;
  std::size_t processes = 1;
  std::vector<ConnectionPlan> connections;
  PutPlan puts;               // each process is a rank
  Handle* handles = nullptr;  // for the connections, then for the ranks
};

// Drawn from the seed, before the run. Sets the variables of the plugin and of softverbs, too. With another number for
// `addresses` softverbs' files lie elsewhere, so that it has other QP numbers.
Job draw_job(std::uint64_t seed, const std::string& plugin, std::uint64_t addresses = 0);

// On the first thread of a process. False, and lines on stderr: something was not as it must be.
bool run_job(const Job& job, std::size_t process);

}  // namespace simulation
