#include "simulation/puts.h"

#include <sched.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <thread>
#include <utility>

#include "simulation/scheduler.h"

namespace simulation {
namespace {

using Kind = Operation::Kind;

// Of a rank in a set, and a last signal for each context and peer. Many ranks share those of four.
constexpr std::size_t kOperations = 60;
constexpr std::size_t kOperationsOfSet = kOperations * kMaxRanks;
constexpr std::size_t kSourceBytes = std::size_t{1} << 18;  // at the begin of a window: they do not change
constexpr std::size_t kBitsOfSignal = 4;
constexpr std::uint64_t kMostOfSignal = 15;
constexpr std::size_t kBitsOfWord = 64;
constexpr std::size_t kSignalsOfWord = kBitsOfWord / kBitsOfSignal;
// Of virtual time. All that is under way takes less than a second, or some seconds while a link is down. Where the
// plugin may give up, it does so after a minute (VERBATIM_RECONNECT_S, VERBATIM_CONNECT_TIMEOUT_S).
constexpr Time kPatience = 30 * kSecond;
constexpr Time kLongPatience = 200 * kSecond;

bool is_put(const Operation& operation) {
  return operation.kind == Kind::kPut || operation.kind == Kind::kPutSignal;
}

bool has_signal(const Operation& operation) {
  return operation.kind == Kind::kPutSignal || operation.kind == Kind::kSignal;
}

std::string describe(const Operation& operation) {
  constexpr const char* kNames[] = {"put", "put with signal", "signal", "get", "flush"};
  return std::string(kNames[static_cast<std::size_t>(operation.kind)]) + " " + std::to_string(operation.number) +
         " of rank " + std::to_string(operation.rank) + " with rank " + std::to_string(operation.peer) +
         " in context " + std::to_string(operation.context) + " of set " + std::to_string(operation.set);
}

unsigned char source_byte(std::size_t rank, std::size_t window, std::size_t at) {
  return content(rank, window, 0, at);
}

void draw_transfer(Draw& draw, PutPlan& plan, Operation& operation) {
  const std::size_t target_rank = operation.kind == Kind::kGet ? operation.rank : operation.peer;
  operation.size = draw.size();
  if (operation.kind == Kind::kPutSignal) operation.size = std::max(operation.size, std::size_t{1});
  operation.source = {draw.below(plan.windows.size()), draw.below(kSourceBytes - operation.size)};
  operation.target.window = draw.below(plan.windows.size());
  std::size_t& end = plan.windows[operation.target.window].bytes[target_rank];
  operation.target.offset = end + draw.below(16);
  end = operation.target.offset + operation.size + kGuardBytes;
}

void draw_operation(Draw& draw, PutPlan& plan, Operation operation) {
  operation.number =
      static_cast<std::size_t>(std::count_if(plan.operations.begin(), plan.operations.end(),
                                             [&](const Operation& other) { return other.rank == operation.rank; }));
  if (is_put(operation) || operation.kind == Kind::kGet) draw_transfer(draw, plan, operation);
  if (operation.kind == Kind::kFlush) operation.target.window = draw.below(plan.windows.size());
  if (!operation.is_last && plan.version > 13) operation.strong = draw.one_in(2);
  plan.operations.push_back(operation);
}

// Of one rank in one set.
void draw_operations(Draw& draw, PutPlan& plan, std::size_t rank, std::size_t set) {
  constexpr Kind kKinds[] = {Kind::kPut,       Kind::kPut,    Kind::kPut, Kind::kPutSignal, Kind::kPutSignal,
                             Kind::kPutSignal, Kind::kSignal, Kind::kGet, Kind::kGet,       Kind::kFlush};
  const std::size_t peers = plan.ranks / plan.stride;
  const auto peer = [&](std::size_t distance) { return (rank + distance * plan.stride) % plan.ranks; };
  for (std::size_t i = 0; i < std::min(kOperations, kOperationsOfSet / plan.ranks); ++i) {
    const Kind kind = kKinds[draw.below(std::size(kKinds))];
    const std::size_t context = draw.below(plan.contexts[set]);
    draw_operation(draw, plan,
                   {.kind = kind, .rank = rank, .set = set, .context = context, .peer = peer(draw.below(peers))});
  }
  for (std::size_t context = 0; context < plan.contexts[set]; ++context) {
    for (std::size_t distance = 0; distance < peers; ++distance) {
      const Kind kind = draw.one_in(2) ? Kind::kSignal : Kind::kPutSignal;
      draw_operation(
          draw, plan,
          {.kind = kind, .rank = rank, .set = set, .context = context, .peer = peer(distance), .is_last = true});
    }
  }
}

// The signals of all ranks and contexts share the words of a rank. Every second word is that of no signal.
void draw_bits(Draw& draw, PutPlan& plan, std::size_t rank) {
  std::vector<Operation*> signals;
  for (Operation& operation : plan.operations) {
    if (has_signal(operation) && operation.peer == rank) signals.push_back(&operation);
  }
  draw.shuffle(signals);
  for (std::size_t i = 0; i < signals.size(); ++i) {
    signals[i]->bit = i / kSignalsOfWord * 2 * kBitsOfWord + i % kSignalsOfWord * kBitsOfSignal;
    signals[i]->increments = signals[i]->bit % kBitsOfWord == 0 && draw.one_in(2);
  }
  plan.words.push_back((signals.size() / kSignalsOfWord + 1) * 2);
}

}  // namespace

PutPlan draw_puts(Draw& draw, std::size_t ranks) {
  PutPlan plan;
  plan.ranks = 2 + draw.below(kMaxRanks - 1);
  if (ranks != 0) plan.ranks = ranks;
  if (draw.one_in(2)) plan.version = 13;
  if (plan.version > 13 && plan.ranks % 2 == 0 && draw.one_in(3)) plan.stride = 2;
  plan.contexts.resize(1 + draw.below(2));
  for (std::size_t& contexts : plan.contexts) contexts = 1 + draw.below(3);
  plan.windows.resize(1 + draw.below(3));
  for (PutPlan::Window& window : plan.windows) {
    window.in_gpu_memory = draw.one_in(2);
    window.bytes.assign(plan.ranks, kSourceBytes + kGuardBytes);
  }
  plan.under_way = 1 + draw.below(nccl::kNetMaxRequests);
  plan.tests_all = draw.one_in(2);
  for (std::size_t rank = 0; rank < plan.ranks; ++rank) {
    for (std::size_t set = 0; set < plan.contexts.size(); ++set) draw_operations(draw, plan, rank, set);
  }
  for (std::size_t rank = 0; rank < plan.ranks; ++rank) draw_bits(draw, plan, rank);
  for (PutPlan::Window& window : plan.windows) {
    for (std::size_t& bytes : window.bytes) bytes = (bytes / kPageBytes + 1) * kPageBytes;  // whole pages
  }
  return plan;
}

void leave_out(PutPlan& plan, std::size_t ranks, std::size_t operations) {
  plan.ranks = ranks;
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> seen;
  std::erase_if(plan.operations, [&](const Operation& operation) {
    if (std::max(operation.rank, operation.peer) >= ranks) return true;
    return ++seen[{operation.rank, operation.set}] > operations && !operation.is_last;
  });
}

Rank::Rank(netapi::RmaPlugin& net, const PutPlan& plan, std::size_t rank, const Faults& faults, Handle* handles)
    : net_(net),
      plan_(plan),
      rank_(rank),
      faults_(faults),
      patience_(faults.kinds.empty() ? kPatience : kLongPatience),
      handles_(handles),
      call_("rank " + std::to_string(rank), [this] { return may_fail(); }),
      signals_((plan.words[rank] * sizeof(std::uint64_t) / kPageBytes + 1) * kPageBytes) {
  for (std::size_t i = 0; i < plan.windows.size(); ++i) {
    const fault::DmaBuf& pages = windows_.emplace_back(plan.windows[i].bytes[rank]).pages;
    for (std::size_t at = 0; at < kSourceBytes; ++at) pages.data()[at] = source_byte(rank, i, at);
    std::fill(pages.data() + kSourceBytes, pages.data() + pages.bytes(), kUnwritten);
  }
  sets_.resize(plan.contexts.size());
  for (const Operation& operation : plan.operations) {
    Set& set = sets_[operation.set];
    if (operation.rank == rank) set.own.push_back(&operation);
    if (operation.peer != rank || operation.kind == Kind::kGet || operation.kind == Kind::kFlush) continue;
    set.arrivals.push_back({.operation = &operation, .data = !is_put(operation), .signal = !has_signal(operation)});
  }
}

bool Rank::may_fail() const {
  if (faults_.may_end_job || faults_.may_end_puts || faults_.has_lost_any()) return true;
  if (faults_.qp.process < plan_.ranks) return true;
  const bool has_ended =
      std::any_of(handles_, handles_ + plan_.ranks, [](const Handle& each) { return each.is_given_up.load(); });
  const bool is_set_up = coll_ != nullptr && (has_sets_ || !faults_.may_change_gids());
  return (faults_.may_end_setup && (!is_set_up || has_ended)) ||
         (faults_.may_end_contexts && (!has_sets_ || has_ended));
}

void Rank::run() {
  void* instance = nullptr;
  bool ok = call_(
                "table init", [&] { return net_.init(1, &instance); }, faults_.may_leave_no_port()) &&
            connect(instance) && create_sets() && add_memory(signals_, false, nccl::kMrForceStrictOrdering) &&
            add_memory(windows_[0], plan_.windows[0].in_gpu_memory, 0);
  if (!ok) handles_[rank_].is_given_up = true;
  note_progress();
  std::vector<std::thread> threads;
  for (Set& set : sets_) {
    if (ok) threads.emplace_back([this, &set] { exchange(set); });
  }
  for (std::size_t i = 1; ok && i < windows_.size(); ++i) {
    ok = add_memory(windows_[i], plan_.windows[i].in_gpu_memory, 0);
  }
  for (std::thread& thread : threads) thread.join();
  close(instance);
  const bool is_complete =
      ok && std::all_of(sets_.begin(), sets_.end(), [this](const Set& set) { return is_done(set); });
  check_signals(is_complete);
  check_windows(is_complete);
}

bool Rank::connect(void* instance) {
  void* listen_comm = nullptr;
  Handle& own = handles_[rank_];
  if (!call_("table listen", [&] { return net_.listen(instance, 0, own.bytes.data(), &listen_comm); })) return false;
  own.is_there = true;
  note_progress();
  std::vector<void*> handles;
  bool all_are_there = true;
  for (std::size_t i = 0; i < plan_.ranks; ++i) {
    while (!handles_[i].is_there && !handles_[i].is_given_up && !faults_.has_lost(i) && !has_aborted()) ::sched_yield();
    all_are_there = all_are_there && handles_[i].is_there;
    handles.push_back(handles_[i].bytes.data());
  }
  int foreign = 0;  // NCCL passes a context that may be another plugin's
  const bool ok = all_are_there && !has_aborted() && call_("table connect", [&] {
                    return net_.connect(&foreign, handles.data(), static_cast<int>(plan_.ranks),
                                        static_cast<int>(rank_), listen_comm, &coll_);
                  });
  return call_("table closeListen", [&] { return net_.close_listen(listen_comm); }) && ok;
}

bool Rank::create_sets() {
  for (std::size_t i = 0; i < sets_.size(); ++i) {
    const netapi::RmaConfig config{.contexts = static_cast<int>(plan_.contexts[i]),
                                   .rank_stride = static_cast<int>(plan_.stride)};
    void*& contexts = sets_[i].contexts;
    const auto create = [&] { return net_.create_context(coll_, config, &contexts); };
    if (has_aborted() || !call_("table createContext", create, faults_.may_change_gids())) return false;
  }
  has_sets_ = true;
  return true;
}

bool Rank::add_memory(Memory& memory, bool in_gpu_memory, std::uint64_t flags) {
  if (has_aborted()) return false;
  void* mhandle = nullptr;
  const fault::DmaBuf& pages = memory.pages;
  const bool ok = in_gpu_memory
                      ? call_("table regMrSymDmaBuf",
                              [&] {
                                return net_.reg_mr_dmabuf(coll_, pages.data(), pages.bytes(), nccl::kPtrCuda, 0,
                                                          pages.fd(), flags, &mhandle);
                              })
                      : call_("table regMrSym", [&] {
                          return net_.reg_mr(coll_, pages.data(), pages.bytes(), nccl::kPtrHost, flags, &mhandle);
                        });
  memory.mhandle = mhandle;
  note_progress();
  return ok;
}

void Rank::close(void* instance) {
  const auto destroy = [&] {
    for (Set& set : sets_) {
      if (set.contexts == nullptr) continue;
      call_("table destroyContext", [&] { return net_.destroy_context(set.contexts); });
    }
  };
  const auto deregister = [&](const Memory& memory) {
    if (memory.mhandle == nullptr) return;
    call_("table deregMrSym", [&] { return net_.dereg_mr(coll_, memory.mhandle); });
  };
  const bool has_requests =
      std::any_of(sets_.begin(), sets_.end(), [](const Set& set) { return !set.requests.empty(); });
  const bool are_under_way = !plan_.tests_all || has_aborted() || has_requests;
  if (are_under_way) destroy();  // they use the memory
  deregister(signals_);
  for (const Memory& window : windows_) deregister(window);
  if (!are_under_way) destroy();
  if (coll_ != nullptr) call_("table closeColl", [&] { return net_.close_coll(coll_); });
  if (instance != nullptr) call_("table finalize", [&] { return net_.finalize(instance); });
}

// A set that is done makes calls until all are: what it has under way may have to be posted again, and the peers may
// wait for it.
void Rank::exchange(Set& set) {
  set.moved = now();
  bool ok = true;
  bool is_counted = false;
  while (ok && !call_.has_failed() && !has_aborted() && !waits_in_vain(set)) {
    if (is_done(set) && !std::exchange(is_counted, true)) ++ended_sets_;
    if (is_counted && ended_sets_ == sets_.size()) break;
    faults_.wait_while_idle();
    bool moved = false;
    ok = begin(set, moved) && test(set, moved) &&
         call_("table rmaProgress", [&] { return net_.progress(set.contexts); });
    look_at_signals(set, moved);
    if (moved) {
      set.moved = now();
      note_progress();
    } else if (!is_counted && now() > set.moved + patience_) {
      report_missing(set);
      ok = false;
    } else {
      ::sched_yield();
    }
  }
  if (!is_counted) ++ended_sets_;
  if (ok && !is_done(set) && has_aborted()) count_fault(Fault::kAbort);
  if (!is_done(set) && waits_in_vain(set)) note_early_close();
  bool has_failed = false;
  call_("table queryLastError", [&] { return net_.query_last_error(set.contexts, &has_failed); });
  if (has_failed && !call_.has_failed()) call_.add_failure("queryLastError reports a failure");
}

bool Rank::begin(Set& set, bool& moved) {
  while (set.next < set.own.size() && set.requests.size() < plan_.under_way) {
    const Operation& operation = *set.own[set.next];
    if (now() < faults_.begin_of(set.next, set.own.size())) break;
    if (!may_begin(set, operation)) break;
    void* request = nullptr;
    if (!begin_one(set, operation, request)) return false;
    ++set.next;
    moved = true;
    if (request != nullptr) {
      set.requests.push_back({&operation, request});
    } else if (operation.kind == Kind::kFlush) {
      record("nothing to flush", 0);
    } else {
      call_.add_problem("no request: " + describe(operation));
      return false;
    }
  }
  return true;
}

bool Rank::may_begin(const Set& set, const Operation& operation) const {
  if (windows_[operation.source.window].mhandle == nullptr) return false;
  if (windows_[operation.target.window].mhandle == nullptr) return false;
  return !operation.is_last || std::none_of(set.requests.begin(), set.requests.end(), [](const Request& request) {
    return request.operation->kind == Kind::kGet;
  });
}

netapi::RmaPart Rank::part(const Operation::Place& place) const {
  return {windows_[place.window].mhandle, place.offset};
}

bool Rank::begin_one(const Set& set, const Operation& operation, void*& request) {
  const auto context = static_cast<int>(operation.context);
  const auto peer = static_cast<std::uint32_t>(operation.peer);
  const netapi::RmaPart source = part(operation.source);
  const netapi::RmaPart target = part(operation.target);
  switch (operation.kind) {
    case Kind::kPut:
      return call_("table iput",
                   [&] { return net_.iput(set.contexts, context, source, operation.size, target, peer, &request); });
    case Kind::kGet:
      return call_("table iget",
                   [&] { return net_.iget(set.contexts, context, source, operation.size, target, peer, &request); });
    case Kind::kFlush:
      return call_("table iflush", [&] { return net_.iflush(set.contexts, context, target.mhandle, peer, &request); });
    case Kind::kPutSignal:
    case Kind::kSignal:
      break;
  }
  const bool has_data = operation.kind == Kind::kPutSignal;
  const std::size_t word = operation.bit / kBitsOfWord;
  const netapi::RmaSignal signal{
      .word = {signals_.mhandle, word * sizeof(std::uint64_t)},
      .value = operation.increments ? 0 : std::uint64_t{1} << operation.bit % kBitsOfWord,
      .operation = operation.increments ? nccl::kSignalIncrement : nccl::kSignalAdd,
      .strong = operation.strong,
  };
  return call_("table iputSignal", [&] {
    return net_.iput_signal(set.contexts, context, has_data ? source : netapi::RmaPart{}, operation.size,
                            has_data ? target : netapi::RmaPart{}, peer, signal, &request);
  });
}

bool Rank::test(Set& set, bool& moved) {
  for (Request& request : set.requests) {
    int is_done = 0;
    if (!call_("table test", [&] { return net_.test(coll_, request.request, &is_done); })) {
      if (!call_.has_failed()) call_.add_problem("failed: " + describe(*request.operation));
      return false;
    }
    record("done", is_done);
    if (is_done == 0) continue;
    request.request = nullptr;
    count_done();
    moved = true;
    if (request.operation->kind == Kind::kGet) check_and_reset(*request.operation);
  }
  std::erase_if(set.requests, [](const Request& request) { return request.request == nullptr; });
  return true;
}

std::size_t Rank::count(const Operation& operation) const {
  const auto* const words = reinterpret_cast<const std::uint64_t*>(signals_.pages.data());
  const std::uint64_t word = __atomic_load_n(&words[operation.bit / kBitsOfWord], __ATOMIC_ACQUIRE);
  return word >> operation.bit % kBitsOfWord & kMostOfSignal;
}

void Rank::look_at_signals(Set& set, bool& moved) {
  for (Arrival& arrival : set.arrivals) {
    const Operation& operation = *arrival.operation;
    if (arrival.signal || count(operation) == 0) continue;
    arrival.signal = true;
    moved = true;
    record("signal", static_cast<std::int64_t>(operation.number));
    for (Arrival& put : set.arrivals) {
      if (put.operation->rank == operation.rank && put.operation->context == operation.context && !put.data &&
          (operation.strong ? put.operation->number <= operation.number : &put == &arrival)) {
        put.data = true;
        check_and_reset(*put.operation);
      }
    }
  }
}

bool Rank::is_done(const Set& set) const {
  return set.next == set.own.size() && (set.requests.empty() || !plan_.tests_all) &&
         std::all_of(set.arrivals.begin(), set.arrivals.end(), [](const Arrival& arrival) { return arrival.signal; });
}

bool Rank::waits_in_vain(const Set& set) const {
  return faults_.has_aborted_any() && set.next == set.own.size() && set.requests.empty();
}

void Rank::report_missing(const Set& set) {
  for (const Request& request : set.requests) call_.add_problem("does not end: " + describe(*request.operation));
  for (const Arrival& arrival : set.arrivals) {
    // A rank that has closed without a lane has given up what it had under way.
    if (arrival.signal || has_closed_early(arrival.operation->rank)) continue;
    call_.add_problem("signal lost: " + describe(*arrival.operation));
  }
}

void Rank::check_and_reset(const Operation& operation) {
  const std::size_t source_rank = operation.kind == Kind::kGet ? operation.peer : operation.rank;
  unsigned char* const data = windows_[operation.target.window].pages.data() + operation.target.offset;
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < operation.size; ++i) {
    wrong += data[i] != source_byte(source_rank, operation.source.window, operation.source.offset + i) ? 1U : 0U;
  }
  std::fill_n(data, operation.size, kUnwritten);
  bytes_checked_ += operation.size;
  if (wrong != 0) call_.add_problem("wrong bytes: " + std::to_string(wrong) + " of " + describe(operation));
}

// Bytes that are right are as those that have not come.
void Rank::forget_arrived(const Operation& operation) {
  const std::size_t source_rank = operation.kind == Kind::kGet ? operation.peer : operation.rank;
  unsigned char* const data = windows_[operation.target.window].pages.data() + operation.target.offset;
  for (std::size_t i = 0; i < operation.size; ++i) {
    if (data[i] == source_byte(source_rank, operation.source.window, operation.source.offset + i)) data[i] = kUnwritten;
  }
}

// After all: also what came late. Not complete: what has not been seen may have come or not.
void Rank::check_signals(bool is_complete) {
  const auto* const words = reinterpret_cast<const std::uint64_t*>(signals_.pages.data());
  std::vector<std::uint64_t> beside(words, words + signals_.pages.bytes() / sizeof *words);
  for (const Set& set : sets_) {
    for (const Arrival& arrival : set.arrivals) {
      const Operation& operation = *arrival.operation;
      if (!has_signal(operation)) continue;
      beside[operation.bit / kBitsOfWord] &= ~(kMostOfSignal << operation.bit % kBitsOfWord);
      if (const std::size_t counted = count(operation); counted != 1 && (is_complete || counted != 0)) {
        call_.add_problem("signal counted " + std::to_string(counted) + " times: " + describe(operation));
      }
    }
  }
  if (std::any_of(beside.begin(), beside.end(), [](std::uint64_t word) { return word != 0; })) {
    call_.add_problem("wrong bytes: beside the signals");
  }
}

void Rank::check_windows(bool is_complete) {
  for (const Operation& operation : plan_.operations) {
    const bool comes_here = operation.kind == Kind::kGet ? operation.rank == rank_ : operation.peer == rank_;
    if (!is_complete && comes_here) forget_arrived(operation);
  }
  for (std::size_t window = 0; window < windows_.size(); ++window) {
    const fault::DmaBuf& pages = windows_[window].pages;
    std::size_t wrong = 0;
    for (std::size_t at = 0; at < pages.bytes(); ++at) {
      wrong += pages.data()[at] != (at < kSourceBytes ? source_byte(rank_, window, at) : kUnwritten) ? 1U : 0U;
    }
    if (wrong == 0) continue;
    call_.add_problem("wrong bytes: " + std::to_string(wrong) + " beside what was put into window " +
                      std::to_string(window));
  }
}

}  // namespace simulation
