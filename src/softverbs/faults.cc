#include "softverbs/faults.h"

#include "softverbs/qp.h"
#include "softverbs/settings.h"

namespace verbatim::softverbs {
namespace {

// splitmix64: a number for each (seed, QP, draw), so that what one QP meets does not depend on how threads interleave.
std::uint64_t mixed(std::uint64_t value) {
  value += 0x9e37'79b9'7f4a'7c15;
  value = (value ^ (value >> 30)) * 0xbf58'476d'1ce4'e5b9;
  value = (value ^ (value >> 27)) * 0x94d0'49bb'1331'11eb;
  return value ^ (value >> 31);
}

bool is_behind_something(const Qp& qp) {
  return qp.sends.posted.load(std::memory_order_acquire) != qp.sends.executed.load(std::memory_order_relaxed) + 1;
}

bool matches(const FaultClause& clause, const Qp& qp, std::uint8_t opcode) {
  if ((clause.opcodes & 1U << opcode) == 0) return false;
  if (clause.qp_choice == QpChoice::kOrdinal && clause.qp != qp.ordinal) return false;
  if (clause.qp_choice == QpChoice::kNumber && clause.qp != qp.qp_num) return false;
  if (clause.device != kAnyDevice && clause.device != qp.shared->device) return false;
  return !clause.only_last || !is_behind_something(qp);
}

// The chance that at least one of two things happens.
double either(double first, double second) {
  return first + second - first * second;
}

void apply(const FaultClause& clause, MessageFaults& message) {
  const bool by_chance = clause.rate > 0;
  const auto add = [&](std::uint64_t& times, double& rate) {
    if (by_chance) {
      rate = either(rate, clause.rate);
    } else {
      times = clause.times == kWithoutEnd ? kWithoutEnd : times + clause.times;
    }
  };
  if (clause.kind == FaultKind::kDropRequest || clause.kind == FaultKind::kLoss) {
    add(message.requests_to_lose, message.request_loss_rate);
  }
  if (clause.kind == FaultKind::kDropAck || clause.kind == FaultKind::kLoss) {
    add(message.acks_to_lose, message.ack_loss_rate);
  }
}

// Takes one off, unless there is no end of them.
bool take_one(std::uint64_t& left) {
  if (left == 0) return false;
  if (left != kWithoutEnd) --left;
  return true;
}

}  // namespace

std::atomic<Faults*> g_faults{nullptr};

void Faults::add(const FaultScript& script) {
  MutexLock lock(mutex_);
  for (const FaultClause& clause : script) {
    if (clause.kind == FaultKind::kSeed) {
      seed_.store(clause.seed, std::memory_order_relaxed);
    } else {
      rules_.push_back({clause});
    }
  }
  g_faults.store(rules_.empty() ? nullptr : this, std::memory_order_release);
}

// Each clause looks at a message once, when it is first sent.
QpFaults& Faults::judged(Qp& qp) {
  std::unique_ptr<QpFaults>& kept = qp.requester.faults;
  if (!kept) kept = std::make_unique<QpFaults>();
  QpFaults& state = *kept;
  const std::uint32_t position = qp.sends.executed.load(std::memory_order_relaxed);
  if (state.is_judged && state.position == position) return state;
  state.is_judged = true;
  state.position = position;
  state.message = {};
  const std::uint32_t slot = position & qp.sends.mask;
  MutexLock lock(mutex_);
  state.seen.resize(rules_.size());
  for (std::size_t index = 0; index < rules_.size(); ++index) {
    Rule& rule = rules_[index];
    if (!matches(rule.clause, qp, qp.sends.requests[slot].opcode)) continue;
    std::uint64_t& seen = rule.clause.qp_choice == QpChoice::kEach ? state.seen[index] : rule.seen;
    ++seen;
    if (seen >= rule.clause.nth && seen - rule.clause.nth < rule.clause.count) apply(rule.clause, state.message);
  }
  return state;
}

bool Faults::draw(Qp& qp, double rate) {
  if (rate <= 0) return false;
  const std::uint64_t stream = mixed(seed_.load(std::memory_order_relaxed)) + qp.ordinal;
  const std::uint64_t number = mixed(mixed(stream) + qp.requester.faults->draws++);
  return static_cast<double>(number >> 11) * 0x1p-53 < rate;
}

bool Faults::loses_request(Qp& qp) {
  MessageFaults& message = judged(qp).message;
  return take_one(message.requests_to_lose) || draw(qp, message.request_loss_rate);
}

bool Faults::loses_answer(Qp& qp, bool acknowledges) {
  MessageFaults& message = judged(qp).message;
  return (acknowledges && take_one(message.acks_to_lose)) || draw(qp, message.ack_loss_rate);
}

void start_faults(const Settings& settings) {
  static Faults& instance = *new Faults;  // the device thread outlives static objects
  instance.add(settings.faults);
}

}  // namespace verbatim::softverbs
