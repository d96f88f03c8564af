// The faults of this process. The data path tests one pointer, faults(), which is nullptr while no fault is active.
// This file decides about messages and calls; fault_states.h holds the faults of ports and devices.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/mutex.h"
#include "softverbs/faults/fault_states.h"
#include "softverbs/faults/message_faults.h"
#include "softverbs/host/fault_script.h"
#include "softverbs/host/settings.h"

namespace verbatim::softverbs {

// Interval at which the requester of a frozen process checks whether it is still frozen.
constexpr std::uint64_t kFrozenPollNs = 1'000'000;

// What happens to an attempt to send a step.
enum class SendDecision {
  kSent,
  kLost,
  kLater,   // at due_ns
  kFailed,  // with MessageFaults::status
};

// Created by start_faults. Thread-safe.
class Faults {
 public:
  Faults(Segment& segment, const Settings& settings, FaultActions& actions)
      : segment_(segment), states_(segment, settings, actions, *this) {}

  // Adds clauses to those that are active.
  void add(const FaultScript& script);

  // ---- messages ----
  // `due_ns`: set for kLater.
  SendDecision decide_send(const CurrentRequest& request, std::uint64_t& due_ns);
  // Whether a message that consumes a receive gets an RNR NAK instead.
  bool refuses_receive(const CurrentRequest& request);
  // Whether the response to a step is lost. `acknowledges`: it acknowledges the whole message, not a part of it.
  bool drops_response(const CurrentRequest& request, bool acknowledges);
  // ReceiveEntry::fault of a receive that is being posted. `qp`: nullptr for a shared receive queue.
  std::uint16_t receive_fault(const QpIdentity* qp);
  // Writes random values into the fields that the standard leaves undefined in a completion with an error.
  void randomize_undefined(ibv_wc& completion);

  // ---- calls ----
  // The errno with which this call (a bit of FaultClause::calls) fails, 0: it proceeds. Sleeps when the call is slow.
  int refused_call(std::uint64_t call, std::uint32_t device);
  // The errno with which a registration fails, 0: it proceeds. `regions` and `locked_bytes` include it.
  int refused_registration(std::uint64_t bytes, std::uint64_t regions, std::uint64_t locked_bytes);

  // ---- ports ----
  FaultStates& states() { return states_; }

  // Updates g_faults after a change.
  void update_active();

 private:
  struct Rule {
    FaultClause clause;
    std::uint64_t seen = 0;
  };

  MessageFaults& evaluated(const CurrentRequest& request);
  std::uint64_t next_random(const CurrentRequest& request);
  bool random_event(const CurrentRequest& request, double rate);
  void apply(const CurrentRequest& request, const FaultClause& clause, MessageFaults& message);

  Segment& segment_;
  Mutex mutex_;
  std::vector<Rule> rules_ VERBATIM_GUARDED_BY(mutex_);
  std::uint64_t generation_ VERBATIM_GUARDED_BY(mutex_) = 0;  // incremented when the rules are cleared
  std::atomic<std::uint64_t> seed_{1};
  std::atomic<std::uint64_t> randomized_count_{0};
  std::atomic<std::uint64_t> call_random_count_{0};
  FaultStates states_;
};

extern std::atomic<Faults*> g_faults;

// nullptr while no fault is active.
inline Faults* faults() {
  return g_faults.load(std::memory_order_acquire);
}

// Called when the process has joined: creates its Faults and adds the clauses of SOFTVERBS_FAULTS. The arguments must
// live until the process ends.
void start_faults(Segment& segment, const Settings& settings, FaultActions& actions);
// Adds clauses while the process runs.
void add_faults(const FaultScript& script);

}  // namespace verbatim::softverbs
