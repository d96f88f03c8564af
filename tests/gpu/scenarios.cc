#include "scenarios.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <thread>
#include <vector>

#include "check.h"

namespace verbatim::gpu {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr std::array kSizes = {std::size_t{8}, std::size_t{5000}, std::size_t{300000}, kBufferBytes};
constexpr auto kBlockedTime = 300ms;  // enough for an operation to reach the point where it waits for the last rank
constexpr auto kDataFlowTime = 50ms;  // enough for data to flow
constexpr auto kErrorDeadline = 20s;  // until NCCL reports that a peer has ended
constexpr double kAbortSeconds = 20;  // ncclCommAbort must return within this
constexpr unsigned kRounds = 6;
constexpr std::size_t kLongBytes = std::size_t{256} << 20U;
constexpr unsigned kLongCalls = 32;

std::string in_seconds(double seconds) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f s", seconds);
  return text.data();
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

const Operation& operation_named(std::string_view name) {
  return *std::find_if(kOperations.begin(), kOperations.end(),
                       [&](const Operation& operation) { return operation.name == name; });
}

CheckResult run_at_all_sizes(Exchange& exchange, std::string_view name) {
  const Operation& operation = operation_named(name);
  CheckResult check_result;
  for (const std::size_t bytes : kSizes) {
    const std::size_t count = usable_count(operation, bytes, exchange.position().ranks);
    if (count != 0) check_result += exchange.run(operation, count);
  }
  return check_result;
}

// One exchange and its operation, which runs at the same time as those of the other parts.
struct Part {
  Exchange& exchange;
  const Operation& operation;
};

CheckResult run_together(const std::vector<Part>& parts) {
  CheckResult check_result;
  for (const std::size_t bytes : kSizes) {
    const auto count = [&](const Part& part) {
      return usable_count(part.operation, bytes, part.exchange.position().ranks);
    };
    for (const Part& part : parts) part.exchange.prepare(count(part));
    for (unsigned round = 0; round < kRounds; ++round) {
      for (const Part& part : parts) part.exchange.enqueue(part.operation, count(part));
    }
    for (const Part& part : parts) part.exchange.wait();
    for (const Part& part : parts) check_result += part.exchange.verify(part.operation, count(part));
  }
  return check_result;
}

ncclComm_t split_comm(ncclComm_t parent, int color, int key, bool share_resources) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.splitShare = share_resources ? 1 : 0;
  ncclComm_t child = nullptr;
  check(ncclCommSplit(parent, color, key, &child, &config), "ncclCommSplit");
  return child;
}

// Open files and threads of this process.
struct Footprint {
  std::ptrdiff_t files;
  std::ptrdiff_t threads;

  bool operator==(const Footprint&) const = default;
};

Footprint footprint() {
  const auto entries = [](const char* directory) {
    return std::distance(std::filesystem::directory_iterator(directory), std::filesystem::directory_iterator{});
  };
  return {entries("/proc/self/fd"), entries("/proc/self/task")};
}

double abort_in_time(Exchange& exchange) {
  const double seconds = exchange.abort();
  if (seconds > kAbortSeconds) throw std::runtime_error("ncclCommAbort took " + in_seconds(seconds));
  return seconds;
}

// NCCL connects ranks at the first call that needs a connection: this call makes those of the long operation.
void connect_for_long_operation(Exchange& exchange, CheckResult& check_result) {
  check_result += exchange.run(operation_named("all_reduce"), kLongBytes / sizeof(Element));
}

// Enqueues more data than the network carries before the interruption, with fewer calls than CUDA and NCCL can queue.
void start_long_operation(Exchange& exchange) {
  const std::size_t count = kLongBytes / sizeof(Element);
  exchange.prepare(count);
  for (unsigned i = 0; i < kLongCalls; ++i) exchange.enqueue(operation_named("all_reduce"), count);
}

void expect_unfinished(const Exchange& exchange) {
  if (exchange.finished()) throw std::runtime_error("the operation ended before it could be interrupted");
}

// Waits until NCCL reports a failed network; throws if it does not in time. Returns a note for the table.
std::string await_network_error(const Exchange& exchange) {
  const auto start = Clock::now();
  while (exchange.network_state() == ncclSuccess) {
    if (Clock::now() - start > kErrorDeadline)
      throw std::runtime_error("NCCL reported nothing within " + in_seconds(seconds_since(start)));
    std::this_thread::sleep_for(1ms);
  }
  return "NCCL reported \"" + std::string(ncclGetErrorString(exchange.network_state())) + "\" after " +
         in_seconds(seconds_since(start));
}

// After an abort a new communicator of the same process must work.
CheckResult run_on_new_comm(ScenarioContext& context) {
  Exchange exchange = context.new_exchange();
  CheckResult check_result = run_at_all_sizes(exchange, "all_reduce");
  check_result += run_at_all_sizes(exchange, "sendrecv");
  exchange.close();
  return check_result;
}

}  // namespace

ncclComm_t ScenarioContext::new_comm() {
  ncclComm_t comm = nullptr;
  check(ncclCommInitRank(&comm, plan_.ranks, parent_.exchange_id(rank_), rank_), "ncclCommInitRank");
  return comm;
}

Exchange ScenarioContext::exchange_on(ncclComm_t comm, Memory memory, std::size_t bytes) {
  BufferPlan buffers;
  buffers.bytes = bytes;
  buffers.series = ++series_;
  buffers.ranks_on_host = static_cast<unsigned>(plan_.ranks);
  buffers.mutate = plan_.mutate;
  buffers.memory = memory;
  return Exchange(comm, buffers);
}

Outcome two_communicators(ScenarioContext& context) {
  Exchange first = context.new_exchange();
  Exchange second = context.new_exchange();
  Outcome outcome;
  outcome.check_result += run_together({{first, operation_named("all_reduce")}, {second, operation_named("sendrecv")}});
  outcome.check_result += run_together({{first, operation_named("alltoall")}, {second, operation_named("all_gather")}});
  second.close();
  outcome.check_result += run_at_all_sizes(first, "all_reduce");
  first.close();
  return outcome;
}

Outcome split(ScenarioContext& context) {
  Outcome outcome;
  for (const bool share_resources : {false, true}) {
    Exchange parent = context.new_exchange();
    const int ranks = parent.position().ranks;
    // all ranks in reverse order; then, with four ranks or more, the even and the odd ones
    Exchange reversed = context.exchange_on(split_comm(parent.comm(), 0, -context.rank(), share_resources));
    if (reversed.position().rank != ranks - 1 - context.rank())
      throw std::runtime_error("the split communicator is not in reverse order");
    outcome.check_result +=
        run_together({{parent, operation_named("all_reduce")}, {reversed, operation_named("reduce_scatter")}});
    if (ranks >= 4) {
      Exchange half = context.exchange_on(split_comm(parent.comm(), context.rank() % 2, 0, share_resources));
      outcome.check_result +=
          run_together({{half, operation_named("sendrecv")}, {reversed, operation_named("alltoall")}});
      half.close();
    }
    parent.close();
    outcome.check_result += run_at_all_sizes(reversed, "sendrecv");
    reversed.close();
  }
  return outcome;
}

Outcome registered_buffers(ScenarioContext& context) {
  Outcome outcome;
  Exchange exchange = context.new_exchange(Memory::kRegistered);
  for (const Operation& operation : kOperations) {
    if (!operation.puts) outcome.check_result += run_at_all_sizes(exchange, operation.name);
  }
  exchange.close();
  return outcome;
}

Outcome recreate(ScenarioContext& context) {
  Outcome outcome;
  Footprint before{};
  for (unsigned round = 0; round < kRounds; ++round) {
    // the first round also opens files and threads that CUDA and NCCL keep for the life of the process
    if (round == 1) before = footprint();
    Exchange exchange = context.new_exchange();
    outcome.check_result += run_at_all_sizes(exchange, round % 2 == 0 ? "all_reduce" : "grouped_sendrecv");
    exchange.close();
  }
  const Footprint after = footprint();
  const auto text = [](Footprint f) {
    return std::to_string(f.files) + " files, " + std::to_string(f.threads) + " threads";
  };
  if (after != before) throw std::runtime_error("not released: " + text(before) + " became " + text(after));
  outcome.note = std::to_string(kRounds) + " times; " + text(after) + " after the first and the last";
  return outcome;
}

// The last rank creates the communicator and starts no operation on it.
Outcome abort_connecting(ScenarioContext& context) {
  Outcome outcome;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;  // a blocking call would wait for the last rank, and could not be aborted
  ncclComm_t comm = nullptr;
  const ncclUniqueId id = context.parent().exchange_id(context.rank());
  ncclResult_t state = ncclCommInitRankConfig(&comm, context.plan().ranks, id, context.rank(), &config);
  while (state == ncclInProgress) check(ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError");
  check(state, "ncclCommInitRankConfig");
  Exchange exchange = context.exchange_on(comm);
  if (!context.is_last_rank()) {
    exchange.prepare(1);
    exchange.enqueue(operation_named("all_reduce"), 1);
    std::this_thread::sleep_for(kBlockedTime);
    check(ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError");
    if (state != ncclInProgress) throw std::runtime_error("the operation did not wait for the last rank");
    outcome.abort_seconds = abort_in_time(exchange);
  }
  context.parent().barrier();
  if (context.is_last_rank()) outcome.abort_seconds = abort_in_time(exchange);
  outcome.check_result += run_on_new_comm(context);
  return outcome;
}

// The last rank takes part in one operation and not in the next.
Outcome abort_stuck(ScenarioContext& context) {
  Outcome outcome;
  Exchange exchange = context.new_exchange(Memory::kCuda, kLongBytes);
  connect_for_long_operation(exchange, outcome.check_result);
  if (!context.is_last_rank()) {
    start_long_operation(exchange);
    std::this_thread::sleep_for(kBlockedTime);
    expect_unfinished(exchange);
    outcome.abort_seconds = abort_in_time(exchange);
  }
  context.parent().barrier();
  if (context.is_last_rank()) outcome.abort_seconds = abort_in_time(exchange);
  outcome.check_result += run_on_new_comm(context);
  return outcome;
}

Outcome abort_midway(ScenarioContext& context) {
  Outcome outcome;
  Exchange exchange = context.new_exchange(Memory::kCuda, kLongBytes);
  connect_for_long_operation(exchange, outcome.check_result);
  start_long_operation(exchange);
  std::this_thread::sleep_for(kDataFlowTime);
  expect_unfinished(exchange);
  if (!context.is_last_rank()) outcome.note = await_network_error(exchange);
  outcome.abort_seconds = abort_in_time(exchange);
  context.parent().barrier();
  outcome.check_result += run_on_new_comm(context);
  return outcome;
}

Outcome peer_killed(ScenarioContext& context) {
  Outcome outcome;
  if (!context.plan().replacement) {
    Exchange exchange = context.new_exchange(Memory::kCuda, kLongBytes);
    connect_for_long_operation(exchange, outcome.check_result);
    start_long_operation(exchange);
    std::this_thread::sleep_for(kDataFlowTime);
    expect_unfinished(exchange);
    if (context.is_last_rank()) {
      context.parent().send(make_report(Report::Kind::kAboutToBeKilled));
      raise(SIGKILL);
    }
    outcome.note = await_network_error(exchange);
    outcome.abort_seconds = abort_in_time(exchange);
  }
  context.parent().barrier();
  context.start_series(kPeerKilled);  // the same contents as the replacement has
  outcome.check_result += run_on_new_comm(context);
  return outcome;
}

}  // namespace verbatim::gpu
