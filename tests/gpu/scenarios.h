// Scenarios: use of communicators beyond operations on a single one. A new scenario is one more row in kScenarios.
#pragma once

#include <array>
#include <string>

#include "exchange.h"
#include "parent.h"
#include "rank.h"

namespace verbatim::gpu {

inline constexpr std::size_t kBufferBytes = std::size_t{16} << 20U;

// The arguments of every scenario.
class ScenarioContext {
 public:
  ScenarioContext(const Plan& plan, int rank, Parent& parent) : plan_(plan), rank_(rank), parent_(parent) {}

  // A new communicator of all ranks; the second function adds buffers.
  ncclComm_t new_comm();
  Exchange new_exchange(Memory memory = Memory::kCuda, std::size_t bytes = kBufferBytes) {
    return exchange_on(new_comm(), memory, bytes);
  }
  Exchange exchange_on(ncclComm_t comm, Memory memory = Memory::kCuda, std::size_t bytes = kBufferBytes);

  // The contents of the following exchanges depend only on `scenario`, so that a replacement has the same as the
  // others.
  void start_series(std::size_t scenario) { series_ = static_cast<unsigned>(scenario) * kExchangesOfScenario; }

  const Plan& plan() const { return plan_; }
  int rank() const { return rank_; }
  bool is_last_rank() const { return rank_ == plan_.ranks - 1; }
  Parent& parent() { return parent_; }

 private:
  static constexpr unsigned kExchangesOfScenario = 16;

  const Plan& plan_;
  const int rank_;
  Parent& parent_;
  unsigned series_ = 0;
};

struct Outcome {
  CheckResult check_result;
  double abort_seconds = 0;  // the longest ncclCommAbort
  std::string note;
};

struct Scenario {
  const char* name;
  const char* summary;
  Outcome (*run)(ScenarioContext& context);
};

Outcome two_communicators(ScenarioContext& context);
Outcome split(ScenarioContext& context);
Outcome registered_buffers(ScenarioContext& context);
Outcome recreate(ScenarioContext& context);
Outcome abort_connecting(ScenarioContext& context);
Outcome abort_stuck(ScenarioContext& context);
Outcome abort_midway(ScenarioContext& context);
Outcome peer_killed(ScenarioContext& context);

inline constexpr std::array kScenarios = {
    Scenario{"two_communicators", "operations on both at the same time", two_communicators},
    Scenario{"split", "ncclCommSplit, with and without shared resources, operations on both comms", split},
    Scenario{"registered_buffers", "ncclMemAlloc and ncclCommRegister", registered_buffers},
    Scenario{"recreate", "destroyed and created again; no file and no thread remains", recreate},
    Scenario{"abort_connecting", "ncclCommAbort while one rank never connects", abort_connecting},
    Scenario{"abort_stuck", "ncclCommAbort while one rank does not take part", abort_stuck},
    Scenario{"abort_midway", "one rank aborts while data flows", abort_midway},
    Scenario{"peer_killed", "one rank is killed while data flows, and another process replaces it", peer_killed},
};
inline constexpr std::size_t kPeerKilled = kScenarios.size() - 1;

}  // namespace verbatim::gpu
