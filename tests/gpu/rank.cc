#include "rank.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "check.h"
#include "exchange.h"
#include "operations.h"
#include "parent.h"
#include "scenarios.h"

namespace verbatim::gpu {
namespace {

using Clock = std::chrono::steady_clock;

// Calls that are checked one by one before the timed calls; they are also the warm-up.
constexpr unsigned kCheckedCalls = 2;
// Above this size a quarter of the timed calls is enough.
constexpr std::size_t kLongCallBytes = std::size_t{16} << 20U;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// CPU time so far of this process's NCCL progress threads, which call isend, irecv and test. They poll without a pause
// while an operation is outstanding.
double progress_cpu_microseconds() {
  double microseconds = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (name.find("Progress") == std::string::npos) continue;
    // The CPU clock of a thread by its thread ID, computed as pthread_getcpuclockid() of the C library does.
    const int thread = std::stoi(task.path().filename());
    const auto clock = static_cast<clockid_t>((~static_cast<unsigned>(thread) << 3U) | 6U);
    timespec ran{};
    if (::clock_gettime(clock, &ran) != 0) continue;
    microseconds += static_cast<double>(ran.tv_sec) * 1e6 + static_cast<double>(ran.tv_nsec) / 1e3;
  }
  return microseconds;
}

Report run_size(Exchange& exchange, const Plan& plan, std::size_t operation_index, std::size_t count) {
  const Operation& operation = kOperations[operation_index];
  CheckResult check_result;
  for (unsigned checked = 0; checked < kCheckedCalls; ++checked) check_result += exchange.run(operation, count);

  const bool is_long = count * sizeof(Element) > kLongCallBytes;
  const unsigned iterations = is_long ? std::max(1U, plan.iterations / 4) : plan.iterations;
  exchange.prepare(count);
  const double cpu_before = progress_cpu_microseconds();
  const auto start = Clock::now();
  for (unsigned iteration = 0; iteration < iterations; ++iteration) exchange.enqueue(operation, count);
  exchange.wait();
  Report row = make_report(Report::Kind::kRow);
  row.microseconds = microseconds_since(start) / iterations;
  row.cpu_microseconds = (progress_cpu_microseconds() - cpu_before) / iterations;
  check_result += exchange.verify(operation, count);

  row.index = static_cast<std::uint32_t>(operation_index);
  row.count = count;
  row.checked = check_result.checked;
  row.wrong = check_result.wrong;
  return row;
}

void run_sizes(const Plan& plan, int rank, Parent& parent) {
  ncclComm_t comm = nullptr;
  check(ncclCommInitRank(&comm, plan.ranks, parent.exchange_id(rank), rank), "ncclCommInitRank");
  BufferPlan buffers;
  buffers.bytes = plan.last_bytes;
  buffers.ranks_on_host = static_cast<unsigned>(plan.ranks);
  buffers.mutate = plan.mutate;
  if (plan.registered) buffers.memory = Memory::kRegistered;
  if (kOperations[plan.operations.front()].puts) buffers.memory = Memory::kWindows;
  Exchange exchange(comm, buffers);
  for (const std::size_t operation : plan.operations) {
    for (std::size_t bytes = plan.first_bytes;; bytes = std::min(bytes * plan.factor, plan.last_bytes)) {
      const std::size_t count = usable_count(kOperations[operation], bytes, plan.ranks);
      if (count != 0) parent.send(run_size(exchange, plan, operation, count));
      if (bytes == plan.last_bytes) break;
    }
  }
  exchange.close();
}

void run_scenarios(const Plan& plan, int rank, Parent& parent) {
  ScenarioContext context(plan, rank, parent);
  // A replacement starts with the scenario in which the rank was killed.
  auto next = plan.scenarios.begin();
  if (plan.replacement) next = std::find(next, plan.scenarios.end(), kPeerKilled);
  for (; next != plan.scenarios.end(); ++next) {
    context.start_series(*next);
    const auto start = Clock::now();
    const Outcome outcome = kScenarios[*next].run(context);
    Report row = make_report(Report::Kind::kScenario, outcome.note);
    row.index = static_cast<std::uint32_t>(*next);
    row.microseconds = microseconds_since(start);
    row.abort_seconds = outcome.abort_seconds;
    row.checked = outcome.check_result.checked;
    row.wrong = outcome.check_result.wrong;
    parent.send(row);
  }
}

int select_gpu(int rank) {
  int gpus = 0;
  check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  if (gpus == 0) throw std::runtime_error("no GPU");
  check(cudaSetDevice(rank % gpus), "cudaSetDevice");
  return rank % gpus;
}

std::string describe(int gpu) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, gpu), "cudaGetDeviceProperties");
  int version = 0;
  check(ncclGetVersion(&version), "ncclGetVersion");
  return "GPU " + std::to_string(gpu) + " (" + properties.name + "), NCCL " + std::to_string(version / 10000) + "." +
         std::to_string(version / 100 % 100) + "." + std::to_string(version % 100);
}

}  // namespace

int run_rank(const Plan& plan, int rank, int socket) {
  Parent parent(socket);
  try {
    const int gpu = select_gpu(rank);
    if (!plan.operations.empty() && !plan.replacement) run_sizes(plan, rank, parent);
    if (!plan.scenarios.empty()) run_scenarios(plan, rank, parent);
    parent.send(make_report(Report::Kind::kDone, describe(gpu)));
    return 0;
  } catch (const std::exception& error) {
    if (!parent.try_send(make_report(Report::Kind::kError, error.what())))
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    return 1;
  }
}

}  // namespace verbatim::gpu
