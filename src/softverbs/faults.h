// The faults at work in this process. The data path asks one question, faults(), which is nullptr while there are none.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "softverbs/fault_script.h"

namespace verbatim::softverbs {

struct Qp;
struct Settings;

// What the clauses have in store for the message that a QP is about to send; under Qp::execution.
struct MessageFaults {
  std::uint64_t requests_to_lose = 0;
  std::uint64_t acks_to_lose = 0;
  double request_loss_rate = 0;
  double ack_loss_rate = 0;
};

struct QpFaults {
  bool is_judged = false;  // `message` is about the request at `position` of the send queue
  std::uint32_t position = 0;
  MessageFaults message;
  std::uint64_t draws = 0;          // random numbers taken so far
  std::vector<std::uint64_t> seen;  // messages that matched, by clause
};

// Thread-safe, except that a QP is spoken of under its execution lock.
class Faults {
 public:
  // Takes the clauses to those that are at work already.
  void add(const FaultScript& script);

  // At each attempt to send a step: whether it is lost on its way.
  bool loses_request(Qp& qp);
  // When a step was answered: whether the requester does not hear of it. `acknowledges`: the message, not a part of it.
  bool loses_answer(Qp& qp, bool acknowledges);

 private:
  struct Rule {
    FaultClause clause;
    std::uint64_t seen = 0;
  };

  QpFaults& judged(Qp& qp);
  bool draw(Qp& qp, double rate);

  Mutex mutex_;
  std::vector<Rule> rules_ VERBATIM_GUARDED_BY(mutex_);
  std::atomic<std::uint64_t> seed_{1};
};

extern std::atomic<Faults*> g_faults;

// nullptr without faults: the one test of the data path.
inline Faults* faults() {
  return g_faults.load(std::memory_order_acquire);
}

// Puts the clauses of SOFTVERBS_FAULTS to work.
void start_faults(const Settings& settings);

}  // namespace verbatim::softverbs
