#include "verbatim-perf/progress.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <thread>

#include "base/clock.h"
#include "ranks/failure.h"
#include "ranks/loaded_plugin.h"

namespace verbatim::perf {

using ranks::Failure;
using ranks::require;

namespace {

// The value of *request before isend. NCCL does not clear the variable, so the plugin must write it.
char unwritten_request;

}  // namespace

void Progress::prepare(const Plan& plan, const Arithmetic& arithmetic) {
  plan_ = plan;
  arithmetic_ = arithmetic;
  lanes_.clear();
  for (const Lane& lane : plan_.lanes) {
    lanes_.push_back({.lane = &lane, .connection = &connections_.find(lane.flow, lane.sends)});
    lanes_.back().requests.resize(lane.window);
  }
}

void Progress::run(std::uint64_t iterations, bool overlap, std::atomic<std::uint64_t>& finished,
                   std::vector<std::uint64_t>* times_ns) {
  if (overlap) {
    run_lanes(iterations, &finished);
    return;
  }
  for (std::uint64_t iteration = 0; iteration < iterations; ++iteration) {
    const std::uint64_t begin = times_ns != nullptr ? monotonic_ns() : 0;
    run_lanes(1, nullptr);
    if (times_ns != nullptr) times_ns->push_back(monotonic_ns() - begin);
    finished.fetch_add(1, std::memory_order_relaxed);
  }
}

void Progress::run_lanes(std::uint64_t iterations, std::atomic<std::uint64_t>* finished) {
  for (const LocalCopy& copy : plan_.copies) {
    memory_.copy(address(Buffer::kRecv, copy.to), address(Buffer::kSend, copy.from), copy.bytes);
  }
  for (RunningLane& running : lanes_) {
    running.total = running.lane->steps.size() * iterations;
    running.started = running.transferred = running.completed = running.base = 0;
  }
  std::uint64_t reported = 0;
  for (;;) {
    bool all = true;
    bool progressed = false;
    std::uint64_t slowest = iterations;
    for (RunningLane& running : lanes_) {
      progressed = start_step(running) || progressed;
      progressed = complete_steps(running) || progressed;
      all = all && running.completed == running.total;
      slowest = std::min(slowest, running.completed / running.lane->steps.size());
    }
    if (finished != nullptr && slowest > reported) {
      finished->fetch_add(slowest - reported, std::memory_order_relaxed);
      reported = slowest;
    }
    if (all) break;
    if (!progressed) back_off();
  }
  if (!plan_.copies.empty()) memory_.finish();
}

void Progress::back_off() const {
  if (pause_us_ == 0) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(pause_us_));
  }
}

bool Progress::start_step(RunningLane& running) {
  const Lane& lane = *running.lane;
  if (running.started == running.total || running.started - running.completed == lane.window) return false;
  if (running.started - running.base == lane.steps.size()) running.base = running.started;
  if (!may_start(running, lane.steps[running.started - running.base])) return false;
  if (!start(running, running.started)) return false;
  ++running.started;
  return true;
}

// `after_count` counts steps within the iteration; the steps of all earlier iterations are added to it.
bool Progress::may_start(const RunningLane& running, const Step& step) const {
  if (step.after_lane < 0) return true;
  const RunningLane& other = lanes_[static_cast<std::size_t>(step.after_lane)];
  const std::uint64_t iteration = running.base / running.lane->steps.size();
  return other.completed >= iteration * other.lane->steps.size() + step.after_count;
}

bool Progress::start(RunningLane& running, std::uint64_t step) {
  const Lane& lane = *running.lane;
  const ranks::Connection& connection = *running.connection;
  void*& request = running.requests[step % lane.window];
  const Message* const first = &lane.messages[(step - running.base) * lane.group];
  if (lane.sends) {
    request = &unwritten_request;
    require(plugin_.isend(connection.comm, address(first->buffer, first->offset), first->bytes, first->tag,
                          connection.mhandles[static_cast<std::size_t>(first->buffer)], &request),
            "isend (" + connection.to_string() + ")");
    if (request == &unwritten_request) throw Failure("isend returned success without writing *request");
    return request != nullptr;
  }
  void* data[netapi::kMaxGroup];
  void* mhandles[netapi::kMaxGroup];
  std::size_t sizes[netapi::kMaxGroup];
  int tags[netapi::kMaxGroup];
  for (std::size_t i = 0; i < lane.group; ++i) {
    data[i] = address(first[i].buffer, first[i].offset);
    mhandles[i] = connection.mhandles[static_cast<std::size_t>(first[i].buffer)];
    sizes[i] = first[i].capacity;
    tags[i] = first[i].tag;
  }
  request = nullptr;
  require(plugin_.irecv(connection.comm, static_cast<int>(lane.group), data, sizes, tags, mhandles, &request),
          "irecv (" + connection.to_string() + ")");
  return request != nullptr;
}

bool Progress::complete_steps(RunningLane& running) {
  const std::size_t window = running.lane->window;
  bool progressed = false;
  for (; running.transferred < running.started; ++running.transferred) {
    void*& request = running.requests[running.transferred % window];
    int sizes[netapi::kMaxGroup];
    std::fill_n(sizes, running.lane->group, -1);
    if (!test(running, request, sizes)) break;
    check_sizes(running, running.transferred, sizes);
    request = start_flush(running, running.transferred, sizes);
    progressed = true;
  }
  for (; running.completed < running.transferred; ++running.completed) {
    void* const flush = running.requests[running.completed % window];
    if (flush != nullptr && !test(running, flush, nullptr)) break;
    reduce(running, running.completed);
    progressed = true;
  }
  return progressed;
}

bool Progress::test(const RunningLane& running, void* request, int* sizes) const {
  int done = 0;
  require(plugin_.test(request, &done, sizes), "test (" + running.connection->to_string() + ")");
  return done != 0;
}

void Progress::check_sizes(const RunningLane& running, std::uint64_t step, const int* sizes) const {
  const Lane& lane = *running.lane;
  const Message* const first = &lane.messages[step % lane.steps.size() * lane.group];
  for (std::size_t i = 0; i < lane.group; ++i) {
    const auto expected = static_cast<int>(std::min<std::size_t>(first[i].bytes, INT_MAX));
    if (sizes[i] == expected || (lane.sends && sizes[i] == -1)) continue;  // NCCL does not read the size of a send
    throw Failure("test reported " + std::to_string(sizes[i]) + " bytes instead of " + std::to_string(expected) +
                  " for message " + std::to_string(i) + " of " + std::to_string(lane.group) + " (" +
                  running.connection->to_string() + ", step " + std::to_string(step) + ")");
  }
}

// Returns the request of the flush that a receive into GPU memory needs before its data may be read.
void* Progress::start_flush(const RunningLane& running, std::uint64_t step, int* sizes) {
  const Lane& lane = *running.lane;
  if (lane.sends || memory_.is_host()) return nullptr;
  const Message* const first = &lane.messages[step % lane.steps.size() * lane.group];
  void* data[netapi::kMaxGroup];
  void* mhandles[netapi::kMaxGroup];
  for (std::size_t i = 0; i < lane.group; ++i) {
    data[i] = address(first[i].buffer, first[i].offset);
    mhandles[i] = running.connection->mhandles[static_cast<std::size_t>(first[i].buffer)];
  }
  void* request = nullptr;
  require(plugin_.iflush(running.connection->comm, static_cast<int>(lane.group), data, sizes, mhandles, &request),
          "iflush (" + running.connection->to_string() + ")");
  return request;
}

void Progress::reduce(const RunningLane& running, std::uint64_t step) const {
  const Lane& lane = *running.lane;
  const std::uint64_t index = step % lane.steps.size();
  const Message& message = lane.messages[index * lane.group];
  const Reduction& reduction = lane.steps[index].reduction;
  if (!reduction.wanted) return;
  const workload::ReductionKind kind = arithmetic_.kind;
  const auto multiplier_of = [kind](int rank) {
    const bool multiplies = kind == workload::ReductionKind::kMulSum && rank >= 0;
    return multiplies ? workload::multiplier(static_cast<std::uint64_t>(rank)) : 1;
  };
  std::byte* const received = address(message.buffer, message.offset);
  workload::reduce_elements({.type = arithmetic_.type,
                             .kind = kind,
                             .left_multiplier = multiplier_of(reduction.contribution_of),
                             .right_multiplier = multiplier_of(arithmetic_.rank),
                             .divisor = reduction.last ? arithmetic_.ranks : 1},
                            reduction.stays ? received : address(Buffer::kRecv, reduction.offset), received,
                            address(reduction.own, reduction.offset), message.bytes);
}

std::byte* Progress::address(Buffer buffer, std::size_t offset) const {
  return buffers_[static_cast<std::size_t>(buffer)].data + offset;
}

}  // namespace verbatim::perf
