#include "softverbs/faults/faults.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "softverbs/host/settings.h"

namespace verbatim::softverbs {
namespace {

// splitmix64. Each (seed, QP, draw) has its own number, so that the faults of one QP do not depend on the interleaving
// of threads.
std::uint64_t mixed(std::uint64_t value) {
  value += 0x9e37'79b9'7f4a'7c15;
  value = (value ^ (value >> 30)) * 0xbf58'476d'1ce4'e5b9;
  value = (value ^ (value >> 27)) * 0x94d0'49bb'1331'11eb;
  return value ^ (value >> 31);
}

// True for this share of all numbers.
bool is_below(std::uint64_t number, double rate) {
  return static_cast<double>(number >> 11) * 0x1p-53 < rate;
}

bool is_chosen(const FaultClause& clause, const QpIdentity& qp) {
  if (clause.qp_choice == QpChoice::kOrdinal && clause.qp != qp.ordinal) return false;
  if (clause.qp_choice == QpChoice::kNumber && clause.qp != qp.qpn) return false;
  return clause.device == kAnyDevice || clause.device == qp.device;
}

bool is_about_messages(const FaultClause& clause) {
  return clause.kind < FaultKind::kLinkDown;
}

bool is_about_calls(const FaultClause& clause) {
  return clause.kind == FaultKind::kRegistration || clause.kind == FaultKind::kFail || clause.kind == FaultKind::kSlow;
}

// In a clause about ports, `device` selects the port, not the messages that are counted.
bool matches(const FaultClause& clause, const CurrentRequest& request) {
  if (is_about_calls(clause) || (clause.opcodes >> request.opcode & 1) == 0) return false;
  if (!is_about_messages(clause)) {
    FaultClause anywhere = clause;
    anywhere.device = kAnyDevice;
    return is_chosen(anywhere, request.qp);
  }
  return is_chosen(clause, request.qp) && (!clause.only_last || request.is_last_posted);
}

bool is_in_range(const FaultClause& clause, std::uint64_t seen) {
  return seen >= clause.nth && seen - clause.nth < clause.count;
}

// The probability of at least one of two independent events.
double combined_rate(double first, double second) {
  return first + second - first * second;
}

// Decrements a limited count. False when nothing is left.
bool decrement(std::uint64_t& left) {
  if (left == 0) return false;
  if (left != kWithoutEnd) --left;
  return true;
}

void add_times(std::uint64_t& sum, std::uint64_t times) {
  sum = times == kWithoutEnd || sum == kWithoutEnd ? kWithoutEnd : sum + times;
}

}  // namespace

std::atomic<Faults*> g_faults{nullptr};

void Faults::update_active() {
  MutexLock lock(mutex_);
  g_faults.store(rules_.empty() && !states_.has_active() ? nullptr : this, std::memory_order_release);
}

void Faults::add(const FaultScript& script) {
  for (const FaultClause& clause : script) {
    if (clause.kind == FaultKind::kSeed) {
      seed_.store(clause.seed, std::memory_order_relaxed);
    } else if (clause.kind == FaultKind::kClear) {
      {
        MutexLock lock(mutex_);
        rules_.clear();
        ++generation_;
      }
      states_.clear();
    } else if (is_about_messages(clause) || is_about_calls(clause) || clause.after != 0) {
      MutexLock lock(mutex_);
      rules_.push_back({clause});
    } else {
      states_.add(clause);
    }
  }
  update_active();
}

std::uint64_t Faults::next_random(const CurrentRequest& request) {
  const std::uint64_t stream = mixed(seed_.load(std::memory_order_relaxed)) + request.qp.ordinal;
  return mixed(mixed(stream) + request.faults.random_count++);
}

bool Faults::random_event(const CurrentRequest& request, double rate) {
  return rate > 0 && is_below(next_random(request), rate);
}

void Faults::apply(const CurrentRequest& request, const FaultClause& clause, MessageFaults& message) {
  const bool by_chance = clause.rate > 0;
  switch (clause.kind) {
    case FaultKind::kDropRequest:
    case FaultKind::kDropAck:
    case FaultKind::kLoss:
      if (clause.kind != FaultKind::kDropAck) {
        if (by_chance) {
          message.request_loss_rate = combined_rate(message.request_loss_rate, clause.rate);
        } else {
          add_times(message.requests_to_lose, clause.times);
        }
      }
      if (clause.kind != FaultKind::kDropRequest) {
        if (by_chance) {
          message.ack_loss_rate = combined_rate(message.ack_loss_rate, clause.rate);
        } else {
          add_times(message.acks_to_lose, clause.times);
        }
      }
      break;
    case FaultKind::kRnr:
      add_times(message.refusals, clause.times);
      break;
    case FaultKind::kDelay: {
      const std::uint64_t jitter = clause.jitter_ns == 0 ? 0 : next_random(request) % clause.jitter_ns;
      message.arrival_ns = std::max(message.arrival_ns, monotonic_ns()) + clause.delay_ns + jitter;
      break;
    }
    case FaultKind::kComplete:
      message.status = clause.status;
      message.vendor_error = clause.vendor_error;
      break;
    case FaultKind::kDropCompletion:
      message.drops_completion = true;
      break;
    default:
      break;
  }
}

// Evaluates every clause once for each message, when its first packet is sent.
MessageFaults& Faults::evaluated(const CurrentRequest& request) {
  QpFaults& state = request.faults;
  if (state.is_evaluated && state.position == request.position) return state.message;
  std::vector<FaultClause> beginning;
  {
    MutexLock lock(mutex_);
    if (state.generation != generation_) {
      state.generation = generation_;
      state.seen.clear();
    }
    state.seen.resize(rules_.size());
    beginning.reserve(static_cast<std::size_t>(
        std::count_if(rules_.begin(), rules_.end(), [](const Rule& rule) { return rule.clause.after != 0; })));
    // Memory has not run out: no clause counts the message twice.
    state.is_evaluated = true;
    state.position = request.position;
    state.message = {};
    for (std::size_t index = 0; index < rules_.size(); ++index) {
      Rule& rule = rules_[index];
      if (!matches(rule.clause, request)) continue;
      std::uint64_t& seen = rule.clause.qp_choice == QpChoice::kEach ? state.seen[index] : rule.seen;
      ++seen;
      if (is_about_messages(rule.clause)) {
        if (is_in_range(rule.clause, seen)) apply(request, rule.clause, state.message);
      } else if (rule.clause.after != 0 && seen == rule.clause.after + 1) {
        beginning.push_back(rule.clause);
      }
    }
  }
  if (state.message.drops_completion) request.flags |= kSuppressSuccess;
  for (const FaultClause& clause : beginning) states_.begin_at_once(clause);
  return state.message;
}

SendDecision Faults::decide_send(const CurrentRequest& request, std::uint64_t& due_ns) {
  MessageFaults& message = evaluated(request);
  const std::uint64_t now = monotonic_ns();
  if (states_.is_frozen()) {
    due_ns = now + kFrozenPollNs;
    return SendDecision::kLater;
  }
  if (message.status != IBV_WC_SUCCESS) return SendDecision::kFailed;
  if (now < message.arrival_ns) {
    // The requester would time out and repeat the packets, which would arrive even later.
    if (request.timeout_ns != 0 && message.arrival_ns - now > request.timeout_ns) return SendDecision::kLost;
    due_ns = message.arrival_ns;
    return SendDecision::kLater;
  }
  return decrement(message.requests_to_lose) || random_event(request, message.request_loss_rate) ? SendDecision::kLost
                                                                                                 : SendDecision::kSent;
}

bool Faults::refuses_receive(const CurrentRequest& request) {
  return decrement(evaluated(request).refusals);
}

bool Faults::drops_response(const CurrentRequest& request, bool acknowledges) {
  MessageFaults& message = evaluated(request);
  return (acknowledges && decrement(message.acks_to_lose)) || random_event(request, message.ack_loss_rate);
}

std::uint16_t Faults::receive_fault(const QpIdentity* qp) {
  std::uint16_t fault = 0;
  MutexLock lock(mutex_);
  for (Rule& rule : rules_) {
    if (rule.clause.opcodes != kReceiveBit) continue;
    if (qp == nullptr ? rule.clause.qp_choice != QpChoice::kAny : !is_chosen(rule.clause, *qp)) continue;
    if (!is_in_range(rule.clause, ++rule.seen)) continue;
    fault = rule.clause.kind == FaultKind::kDropCompletion ? kWithoutCompletion
                                                           : static_cast<std::uint16_t>(rule.clause.status);
  }
  return fault;
}

void Faults::randomize_undefined(ibv_wc& completion) {
  constexpr std::array kOpcodes{IBV_WC_SEND,      IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ,         IBV_WC_COMP_SWAP,
                                IBV_WC_FETCH_ADD, IBV_WC_RECV,       IBV_WC_RECV_RDMA_WITH_IMM};
  const auto next = [&] {
    return mixed(seed_.load(std::memory_order_relaxed) ^ randomized_count_.fetch_add(1, std::memory_order_relaxed)
                                                             << 32);
  };
  const auto* const right = std::find(kOpcodes.begin(), kOpcodes.end(), completion.opcode);
  const auto place = static_cast<std::size_t>(right - kOpcodes.begin());
  completion.opcode = kOpcodes[(place + 1 + next() % (kOpcodes.size() - 1)) % kOpcodes.size()];
  completion.byte_len = static_cast<std::uint32_t>(next());
  completion.imm_data = static_cast<std::uint32_t>(next());
  completion.src_qp = static_cast<std::uint32_t>(next());
  completion.wc_flags = static_cast<unsigned>(next());
  completion.pkey_index = static_cast<std::uint16_t>(next());
  completion.slid = static_cast<std::uint16_t>(next());
  completion.sl = static_cast<std::uint8_t>(next());
  completion.dlid_path_bits = static_cast<std::uint8_t>(next());
}

int Faults::refused_call(std::uint64_t call, std::uint32_t device) {
  // A program may still destroy its objects, poll, and wait for events.
  constexpr std::uint64_t kAllowedOnFatalDevice =
      call_bit(Verb::kCloseDevice) | call_bit(Verb::kDeallocPd) | call_bit(Verb::kDeregMr) |
      call_bit(Verb::kDestroyCompChannel) | call_bit(Verb::kDestroyCq) | call_bit(Verb::kDestroySrq) |
      call_bit(Verb::kDestroyQp) | call_bit(Verb::kDestroyAh) | call_bit(Verb::kReqNotifyCq) |
      call_bit(Verb::kGetCqEvent) | call_bit(Verb::kGetAsyncEvent) | kPostSendCall | kPostRecvCall | kPostSrqRecvCall |
      kPollCqCall;
  const auto fails = [&] {
    return (call & kAllowedOnFatalDevice) == 0 && segment_.ports[device].fatal.load(std::memory_order_acquire) != 0;
  };
  if (fails()) return EIO;
  int error = 0;
  std::uint64_t delay_ns = 0;
  {
    MutexLock lock(mutex_);
    for (Rule& rule : rules_) {
      const FaultClause& clause = rule.clause;
      if ((clause.calls & call) == 0 || (clause.device != kAnyDevice && clause.device != device)) continue;
      if (!is_in_range(clause, ++rule.seen)) continue;
      const std::uint64_t number =
          mixed(mixed(seed_.load(std::memory_order_relaxed)) - call_random_count_.fetch_add(1));
      if (clause.rate > 0 && !is_below(number, clause.rate)) continue;
      if (clause.kind == FaultKind::kSlow) {
        delay_ns += clause.delay_ns;
      } else {
        error = clause.error != 0 ? clause.error : EIO;
      }
    }
  }
  if (delay_ns == 0) return error;
  std::this_thread::sleep_for(std::chrono::nanoseconds(delay_ns));
  return fails() ? EIO : error;  // the device may have failed meanwhile
}

int Faults::refused_registration(std::uint64_t bytes, std::uint64_t regions, std::uint64_t locked_bytes) {
  MutexLock lock(mutex_);
  for (const Rule& rule : rules_) {
    const FaultClause& clause = rule.clause;
    if (clause.kind != FaultKind::kRegistration) continue;
    if (bytes > clause.max_bytes || regions > clause.max_regions || locked_bytes > clause.max_locked) {
      return clause.error != 0 ? clause.error : ENOMEM;
    }
  }
  return 0;
}

namespace {

std::atomic<Faults*> g_all_faults{nullptr};  // set also when no fault is active

}  // namespace

void start_faults(Segment& segment, const Settings& settings, FaultActions& actions) {
  g_faults.store(nullptr, std::memory_order_release);  // a forked child inherits its parent's pointer
  auto* const created =
      new Faults(segment, settings, actions);  // never deleted: the device thread outlives static objects
  // Objects inherited from a parent are kept and not used: a thread of the parent may have held their locks at the
  // fork.
  static std::vector<Faults*>& inherited = *new std::vector<Faults*>;
  inherited.push_back(g_all_faults.exchange(created, std::memory_order_acq_rel));
  created->add(settings.faults);
}

void add_faults(const FaultScript& script) {
  if (Faults* all = g_all_faults.load(std::memory_order_acquire); all != nullptr) all->add(script);
}

}  // namespace verbatim::softverbs
