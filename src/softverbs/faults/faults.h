// The faults of this process. The data path tests one pointer, faults(), which is nullptr while no fault is active.
// This file decides about messages and calls; fault_states.h holds the faults of ports and devices.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/mutex.h"
#include "softverbs/faults/fault_states.h"
#include "softverbs/host/fault_script.h"

namespace verbatim::softverbs {

class Process;
struct Qp;

// The faults that apply to one message.
struct MessageFaults {
  std::uint64_t requests_to_lose = 0;
  std::uint64_t acks_to_lose = 0;
  std::uint64_t refusals = 0;  // number of RNR NAKs
  double request_loss_rate = 0;
  double ack_loss_rate = 0;
  std::uint64_t arrival_ns = 0;  // when the first packet arrives
  ibv_wc_status status = IBV_WC_SUCCESS;
  std::uint32_t vendor_error = 0;
  bool drops_completion = false;
};

// Of one QP, guarded by Qp::execution.
struct QpFaults {
  bool is_evaluated = false;  // `message` applies to the request at `position` of the send queue
  std::uint32_t position = 0;
  MessageFaults message;
  std::uint64_t random_count = 0;   // random numbers drawn so far
  std::vector<std::uint64_t> seen;  // number of matching messages, by clause
  std::uint64_t generation = 0;     // of the clauses that `seen` counts for
};

// Interval at which the requester of a frozen process checks whether it is still frozen.
constexpr std::uint64_t kFrozenPollNs = 1'000'000;

// What happens to an attempt to send a step.
enum class SendDecision {
  kSent,
  kLost,
  kLater,   // see Requester::due_ns
  kFailed,  // see Faults::status
};

// Thread-safe. A caller that passes a QP holds its execution lock.
class Faults {
 public:
  explicit Faults(Process& process) : process_(process), states_(process, *this) {}

  // Adds clauses to those that are active.
  void add(const FaultScript& script);

  // ---- messages ----
  SendDecision decide_send(Qp& qp);
  ibv_wc_status status(const Qp& qp) const;
  std::uint32_t vendor_error(const Qp& qp) const;  // of the message that completes now
  // Whether a message that consumes a receive gets an RNR NAK instead.
  bool refuses_receive(Qp& qp);
  // Whether the response to a step is lost. `acknowledges`: it acknowledges the whole message, not a part of it.
  bool drops_response(Qp& qp, bool acknowledges);
  // ReceiveEntry::fault of a receive that is being posted. `qp`: nullptr for a shared receive queue.
  std::uint16_t receive_fault(const Qp* qp);
  // Writes random values into the fields that the standard leaves undefined in a completion with an error.
  void randomize_undefined(ibv_wc& completion);

  // ---- calls ----
  // The errno with which this call (a bit of FaultClause::calls) fails, 0: it proceeds.
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

  QpFaults& evaluated(Qp& qp);
  std::uint64_t next_random(Qp& qp);
  bool random_event(Qp& qp, double rate);
  void apply(Qp& qp, const FaultClause& clause, MessageFaults& message);

  Process& process_;
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

// Every verb calls it first: counts the call and applies pending fault commands. Returns the errno with which the call
// must fail, and sets errno to it; 0: the call proceeds.
int begin_call(Verb verb, ibv_context* context);

// The same for verbs of the data path, which are counted elsewhere.
inline int begin_data_call(std::uint64_t call, std::uint32_t device) {
  Faults* const all = faults();
  return all == nullptr ? 0 : all->refused_call(call, device);
}

// Called when the process has joined: creates its Faults and adds the clauses of SOFTVERBS_FAULTS.
void start_faults(Process& process);
// Adds clauses while the process runs.
void add_faults(const FaultScript& script);

}  // namespace verbatim::softverbs
