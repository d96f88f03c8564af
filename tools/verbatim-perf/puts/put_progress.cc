#include "verbatim-perf/puts/put_progress.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/clock.h"
#include "netapi/log.h"
#include "ranks/failure.h"
#include "ranks/loaded_plugin.h"

namespace verbatim::perf {
namespace {

constexpr std::uint64_t kSignalLimitNs = 30 * kNanosecondsPerSecond;  // without any change of a word

// The value of *request before a call. NCCL does not clear the variable, so the plugin must write it.
char unwritten_put;

}  // namespace

void PutProgress::prepare(const std::vector<Transfer>& transfers) {
  lanes_.clear();
  for (const Transfer& transfer : transfers) lanes_.push_back({.transfer = transfer, .requests = {}});
}

void PutProgress::run(std::uint64_t iterations, std::atomic<std::uint64_t>& finished) {
  if (shape_.operation != OperationKind::kAllToAllPut) {
    run_transfers(iterations, &finished);
    wait_for_signals(iterations);
    return;
  }
  for (std::uint64_t i = 0; i < iterations; ++i) {
    run_transfers(1, nullptr);
    wait_for_signals(1);
    finished.fetch_add(1, std::memory_order_relaxed);
  }
}

void PutProgress::run_transfers(std::uint64_t iterations, std::atomic<std::uint64_t>* finished) {
  for (Lane& lane : lanes_) lane.started = lane.done = 0;
  for (bool all = lanes_.empty(); !all;) {
    bool progressed = false;
    all = true;
    for (Lane& lane : lanes_) {
      progressed = advance(lane, iterations) || progressed;
      all = all && lane.done == iterations;
    }
    if (finished != nullptr) finished->store(lanes_.front().done, std::memory_order_relaxed);
    if (!progressed) pause();
  }
}

// True: something was started or is done.
bool PutProgress::advance(Lane& lane, std::uint64_t iterations) {
  bool progressed = false;
  while (lane.started < iterations && lane.requests.size() < depth_) {
    start(lane);
    progressed = true;
  }
  int done = 1;
  while (done != 0 && !lane.requests.empty()) {
    done = 0;
    ranks::require(plugin_.test(memory_.coll, lane.requests.front(), &done), "test");
    if (done == 0) break;
    lane.requests.pop_front();
    ++lane.done;
    progressed = true;
  }
  return progressed;
}

void PutProgress::start(Lane& lane) {
  const Transfer& one = lane.transfer;
  const bool empty = one.bytes == 0;
  void* request = &unwritten_put;
  const char* call = "iput";
  nccl::Result result = nccl::Result::kSuccess;
  if (shape_.operation == OperationKind::kGet) {
    call = "iget";
    result = plugin_.iget(memory_.contexts, one.context, {memory_.send, one.remote_offset}, one.bytes,
                          {memory_.recv, one.local_offset}, one.peer, &request);
  } else if (shape_.operation == OperationKind::kPut) {
    result = plugin_.iput(memory_.contexts, one.context, {memory_.send, one.local_offset}, one.bytes,
                          {memory_.recv, one.remote_offset}, one.peer, &request);
  } else {
    call = "iputSignal";
    const netapi::RmaSignal signal{
        .word = {memory_.words, signal_word(shape_, shape_.rank, one.context) * sizeof(std::uint64_t)},
        .value = signal_value(shape_.rank, one.context),
        .operation = is_increment(one.context) ? nccl::kSignalIncrement : nccl::kSignalAdd};
    const netapi::RmaPart nothing;
    const netapi::RmaPart source{memory_.send, one.local_offset};
    const netapi::RmaPart target{memory_.recv, one.remote_offset};
    result = plugin_.iput_signal(memory_.contexts, one.context, empty ? nothing : source, one.bytes,
                                 empty ? nothing : target, one.peer, signal, &request);
  }
  ranks::require(result, call);
  if (request == &unwritten_put || request == nullptr) {
    throw ranks::Failure(std::string(call) + " returned success without a request");
  }
  lane.requests.push_back(request);
  ++lane.started;
}

std::uint64_t PutProgress::read_word(std::size_t index) const {
  return __atomic_load_n(memory_.signals + index, __ATOMIC_ACQUIRE);
}

void PutProgress::wait_for_signals(std::uint64_t iterations) {
  for (const int source : signal_sources(shape_)) {
    for (int context = 0; context < shape_.contexts; ++context) {
      expected_[signal_word(shape_, source, context)] += iterations * signal_value(source, context);
    }
  }
  std::uint64_t sum = 0;
  std::uint64_t changed_ns = monotonic_ns();
  while (!all_signals_arrived()) {
    ranks::require(plugin_.progress(memory_.contexts), "rmaProgress");
    pause();
    std::uint64_t now = 0;
    for (std::size_t i = 0; i < expected_.size(); ++i) now += read_word(i);
    if (now != sum) {
      sum = now;
      changed_ns = monotonic_ns();
    } else if (monotonic_ns() - changed_ns > kSignalLimitNs) {
      throw ranks::Failure("signals have not arrived, and no word has changed for 30 s: " + wrong_signals().front() +
                           ". Next: look at the rank that signals there; --plugin-log shows what the plugin says");
    }
  }
}

bool PutProgress::all_signals_arrived() const {
  for (std::size_t i = 0; i < expected_.size(); ++i) {
    if (read_word(i) < expected_[i]) return false;
  }
  return true;
}

std::vector<std::string> PutProgress::wrong_signals() const {
  std::vector<std::string> wrong;
  for (std::size_t i = 0; i < expected_.size(); ++i) {
    const std::uint64_t value = read_word(i);
    if (value == expected_[i]) continue;
    const std::size_t pair = i / 2;
    const auto contexts = static_cast<std::size_t>(shape_.contexts);
    wrong.push_back((i % 2 == 0 ? "the signal of rank " : "the word behind the signal of rank ") +
                    std::to_string(pair / contexts) + ", context " + std::to_string(pair % contexts) + " is " +
                    std::to_string(value) + " instead of " + std::to_string(expected_[i]));
  }
  return wrong;
}

void PutProgress::pause() const {
  if (pause_us_ == 0) {
    ::sched_yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(pause_us_));
  }
}

}  // namespace verbatim::perf
