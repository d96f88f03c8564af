// The faults at work in this process. The data path asks one question, faults(), which is nullptr while there are none.
// What happens to messages is decided here, as is which calls fail; fault_states.h holds what happens to ports.
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

// What the clauses have in store for one message.
struct MessageFaults {
  std::uint64_t requests_to_lose = 0;
  std::uint64_t acks_to_lose = 0;
  std::uint64_t refusals = 0;  // RNR NAKs
  double request_loss_rate = 0;
  double ack_loss_rate = 0;
  std::uint64_t arrival_ns = 0;  // of the first packet
  ibv_wc_status status = IBV_WC_SUCCESS;
  std::uint32_t vendor_error = 0;
  bool drops_completion = false;
};

// Of one QP, under Qp::execution.
struct QpFaults {
  bool is_evaluated = false;  // `message` is about the request at `position` of the send queue
  std::uint32_t position = 0;
  MessageFaults message;
  std::uint64_t random_count = 0;   // random numbers taken so far
  std::vector<std::uint64_t> seen;  // messages that matched, by clause
  std::uint64_t generation = 0;     // of those clauses
};

// How often a frozen device looks whether it still is.
constexpr std::uint64_t kFrozenPollNs = 1'000'000;

// What becomes of an attempt to send a step.
enum class SendDecision {
  kSent,
  kLost,
  kLater,   // see Requester::due_ns
  kFailed,  // see Faults::status
};

// Thread-safe; a QP is spoken of under its execution lock.
class Faults {
 public:
  explicit Faults(Process& process) : process_(process), states_(process, *this) {}

  // Puts clauses to work, beside those that are.
  void take(const FaultScript& script);

  // ---- messages ----
  SendDecision decide_send(Qp& qp);
  ibv_wc_status status(const Qp& qp) const;
  std::uint32_t vendor_error(const Qp& qp) const;  // of the message that is completed now
  // Whether a message that takes a receive is told that there is none.
  bool refuses_receive(Qp& qp);
  // When a step was answered: whether the requester does not hear of it. `acknowledges`: the message, not a part of it.
  bool drops_response(Qp& qp, bool acknowledges);
  // ReceiveEntry::fault of a receive that is being posted; `qp` is nullptr for a shared queue.
  std::uint16_t receive_fault(const Qp* qp);
  // Fills what the standard leaves undefined in a completion with an error.
  void randomize_undefined(ibv_wc& completion);

  // ---- calls ----
  // The errno with which this call (a bit of FaultClause::calls) shall fail, 0: none.
  int refused_call(std::uint64_t call, std::uint32_t device);
  // The errno of a registration, 0 when it may be; both numbers count it already.
  int refused_registration(std::uint64_t bytes, std::uint64_t regions, std::uint64_t locked_bytes);

  // ---- ports ----
  FaultStates& states() { return states_; }

  // Whether faults() need not be asked any more.
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
  std::uint64_t generation_ VERBATIM_GUARDED_BY(mutex_) = 0;  // changes when they are forgotten
  std::atomic<std::uint64_t> seed_{1};
  std::atomic<std::uint64_t> randomized_count_{0};
  std::atomic<std::uint64_t> call_random_count_{0};
  FaultStates states_;
};

extern std::atomic<Faults*> g_faults;

// nullptr without faults: the one test of the data path.
inline Faults* faults() {
  return g_faults.load(std::memory_order_acquire);
}

// Verbs begin with it: counts the call and takes what tools/softverbs has sent. The errno with which the call shall
// fail, which is also left in errno; 0: it goes on.
int begin_call(Verb verb, ibv_context* context);

// The same of those on the data path, which are counted elsewhere.
inline int begin_data_call(std::uint64_t call, std::uint32_t device) {
  Faults* const all = faults();
  return all == nullptr ? 0 : all->refused_call(call, device);
}

// Of a process that has just joined: puts the clauses of SOFTVERBS_FAULTS to work.
void start_faults(Process& process);
// Adds to them while the process runs.
void add_faults(const FaultScript& script);

}  // namespace verbatim::softverbs
