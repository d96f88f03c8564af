#include "exchange.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"

namespace verbatim::gpu {
namespace {

// Fills the receive buffer before a call, so that elements that the call does not write are found. pattern() rarely
// produces it.
constexpr unsigned char kPoison = 0xa5;
// Elements after the result that are filled with poison and must not change.
constexpr std::size_t kGuardElements = 16384;
constexpr unsigned kIterationsOfSeries = 65536;
constexpr std::size_t kMinElementsPerThread = std::size_t{1} << 18U;

// Splits [0, count) into one range per thread and returns the sum of `work(first, last)`.
template <typename Work>
std::uint64_t sum_over_ranges(std::size_t count, unsigned ranks_on_host, const Work& work) {
  const std::size_t cores = std::max(1U, std::thread::hardware_concurrency() / ranks_on_host);
  const std::size_t threads = std::clamp<std::size_t>(count / kMinElementsPerThread, 1, cores);
  std::vector<std::uint64_t> sums(threads);
  std::vector<std::jthread> running;
  for (std::size_t i = 1; i < threads; ++i) {
    running.emplace_back([&, i] { sums[i] = work(count * i / threads, count * (i + 1) / threads); });
  }
  sums[0] = work(0, count / threads);
  running.clear();  // joins
  return std::accumulate(sums.begin(), sums.end(), std::uint64_t{0});
}

std::size_t result_count(const Operation& operation, std::size_t count, int ranks) {
  return operation.result_is_one_block ? count / static_cast<std::size_t>(ranks) : count;
}

Element* allocate(const BufferPlan& plan) {
  void* memory = nullptr;
  if (plan.memory != Memory::kCuda) {
    check(ncclMemAlloc(&memory, plan.bytes), "ncclMemAlloc");
  } else {
    check(cudaMalloc(&memory, plan.bytes), "cudaMalloc");
  }
  return static_cast<Element*>(memory);
}

}  // namespace

std::size_t usable_count(const Operation& operation, std::size_t bytes, int ranks) {
  const std::size_t count = bytes / sizeof(Element);
  return operation.count_is_multiple_of_ranks ? count - count % static_cast<std::size_t>(ranks) : count;
}

Exchange::Exchange(ncclComm_t comm, const BufferPlan& plan)
    : comm_(comm), plan_(plan), iteration_(plan.series * kIterationsOfSeries) {
  check(ncclCommUserRank(comm, &position_.rank), "ncclCommUserRank");
  check(ncclCommCount(comm, &position_.ranks), "ncclCommCount");
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  send_ = allocate(plan);
  receive_ = allocate(plan);
  check(cudaMallocHost(reinterpret_cast<void**>(&host_), plan.bytes), "cudaMallocHost");
  if (plan.memory == Memory::kRegistered) {
    check(ncclCommRegister(comm, send_, plan.bytes, &send_registration_), "ncclCommRegister");
    check(ncclCommRegister(comm, receive_, plan.bytes, &receive_registration_), "ncclCommRegister");
  }
  if (plan.memory == Memory::kWindows) {
    const auto add = [&](Element* buffer, ncclWindow_t& window) {
      check(ncclCommWindowRegister(comm, buffer, plan.bytes, &window, NCCL_WIN_COLL_SYMMETRIC),
            "ncclCommWindowRegister");
    };
    add(send_, send_window_);
    add(receive_, receive_window_);
  }
}

CheckResult Exchange::run(const Operation& operation, std::size_t count) {
  prepare(count);
  enqueue(operation, count);
  wait();
  return verify(operation, count);
}

// Fills the send buffer with contents of a new iteration, the receive buffer and the elements after it with poison.
void Exchange::prepare(std::size_t count) {
  ++iteration_;
  sum_over_ranges(count, plan_.ranks_on_host, [&](std::size_t first, std::size_t last) {
    for (std::size_t index = first; index < last; ++index) host_[index] = pattern(position_.rank, iteration_, index);
    return std::uint64_t{0};
  });
  check(cudaMemcpy(send_, host_, count * sizeof(Element), cudaMemcpyHostToDevice), "cudaMemcpy");
  const std::size_t poisoned = std::min(plan_.bytes, (count + kGuardElements) * sizeof(Element));
  check(cudaMemset(receive_, kPoison, poisoned), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void Exchange::enqueue(const Operation& operation, std::size_t count) {
  const ncclResult_t result =
      operation.enqueue(Call{send_, receive_, count, position_, comm_, stream_, receive_window_});
  if (result != ncclInProgress) check(result, operation.name);  // a nonblocking communicator is still working
}

bool Exchange::finished() const {
  return cudaStreamQuery(stream_) != cudaErrorNotReady;
}

ncclResult_t Exchange::network_state() const {
  ncclResult_t state = ncclSuccess;
  check(ncclCommGetAsyncError(comm_, &state), "ncclCommGetAsyncError");
  return state == ncclInProgress ? ncclSuccess : state;
}

// Also polls NCCL for asynchronous errors, because NCCL's kernel never ends when the network has failed.
void Exchange::wait() {
  while (!finished()) check(network_state(), "ncclCommGetAsyncError reports an error");
  check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

// Compares every element of the result, and checks that nothing was written after it.
CheckResult Exchange::verify(const Operation& operation, std::size_t count) {
  const std::size_t results = result_count(operation, count, position_.ranks);
  const std::size_t end = std::min(plan_.bytes / sizeof(Element), count + kGuardElements);
  check(cudaMemcpy(host_, receive_, end * sizeof(Element), cudaMemcpyDeviceToHost), "cudaMemcpy");
  if (plan_.mutate) host_[iteration_ % results] ^= Element{1} << (iteration_ % 32U);
  Element poison{};
  std::memset(&poison, kPoison, sizeof poison);
  CheckResult check_result;
  check_result.checked = results;
  check_result.wrong = sum_over_ranges(results, plan_.ranks_on_host, [&](std::size_t first, std::size_t last) {
    std::uint64_t wrong = 0;
    for (std::size_t index = first; index < last; ++index) {
      wrong += host_[index] != operation.expected(position_, iteration_, index, count);
    }
    return wrong;
  });
  if (plan_.mutate && check_result.wrong == 0) throw std::runtime_error("the flipped bit was not found");
  check_result.wrong +=
      static_cast<std::uint64_t>(std::count_if(host_ + results, host_ + end, [&](Element e) { return e != poison; }));
  return check_result;
}

void Exchange::free_buffers() {
  for (Element* const buffer : {send_, receive_}) {
    if (plan_.memory != Memory::kCuda) {
      check(ncclMemFree(buffer), "ncclMemFree");
    } else {
      check(cudaFree(buffer), "cudaFree");
    }
  }
  check(cudaFreeHost(host_), "cudaFreeHost");
  check(cudaStreamDestroy(stream_), "cudaStreamDestroy");
}

void Exchange::close() {
  if (plan_.memory == Memory::kRegistered) {
    check(ncclCommDeregister(comm_, send_registration_), "ncclCommDeregister");
    check(ncclCommDeregister(comm_, receive_registration_), "ncclCommDeregister");
  }
  for (const ncclWindow_t window : {send_window_, receive_window_}) {
    if (window != nullptr) check(ncclCommWindowDeregister(comm_, window), "ncclCommWindowDeregister");
  }
  free_buffers();
  check(ncclCommFinalize(comm_), "ncclCommFinalize");
  check(ncclCommDestroy(comm_), "ncclCommDestroy");
}

double Exchange::abort() {
  const auto start = std::chrono::steady_clock::now();
  check(ncclCommAbort(comm_), "ncclCommAbort");
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  free_buffers();
  return elapsed.count();
}

}  // namespace verbatim::gpu
