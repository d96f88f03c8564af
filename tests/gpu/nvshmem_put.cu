// NVSHMEM between two processes: puts with a signal from GPU memory to GPU memory, in both directions at once. When the
// signal has arrived, every element of the put is compared. See tests/gpu/nvshmem.
//
// Only calls that NVSHMEM has for two processes on one GPU without MPS are used: the host reads the signal, and the
// processes wait for each other in memory that they share.
#include <cuda_runtime.h>
#include <nvshmem.h>
#include <nvshmemx.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_check.h"

namespace verbatim::gpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kProcesses = 2;
constexpr int kWrong = 3;  // exit status: wrong elements or signals
constexpr std::size_t kMostElements = std::size_t{4} << 20U;
constexpr std::array<std::size_t, 6> kElements{1, 31, 1024, 16385, std::size_t{1} << 18U, kMostElements};
constexpr unsigned kRepeats = 5;
constexpr auto kDeadline = std::chrono::seconds(20);

// Of both processes.
struct Shared {
  nvshmemx_uniqueid_t id;
  std::atomic<unsigned> arrived;
};

void wait_until(const char* what, auto condition) {
  const auto end = Clock::now() + kDeadline;
  while (!condition()) {
    if (Clock::now() > end) throw std::runtime_error(std::string("waited in vain for ") + what);
    ::usleep(100);
  }
}

// Counts the barriers; every process passes the same ones.
class Barrier {
 public:
  explicit Barrier(std::atomic<unsigned>& arrived) : arrived_(arrived) {}
  void wait() {
    expected_ += kProcesses;
    arrived_.fetch_add(1);
    wait_until("the other process", [this] { return arrived_.load() >= expected_; });
  }

 private:
  std::atomic<unsigned>& arrived_;
  unsigned expected_ = 0;
};

std::uint32_t element(int sender, unsigned put, std::size_t index) {
  return (static_cast<std::uint32_t>(sender) + 1) * 0x9e3779b1U + put * 0x85ebca6bU + static_cast<std::uint32_t>(index);
}

class Puts {
 public:
  Puts(int rank, bool mutate, Barrier& barrier) : rank_(rank), mutate_(mutate), barrier_(barrier) {
    source_ = static_cast<std::uint32_t*>(nvshmem_malloc(kMostElements * sizeof(std::uint32_t)));
    target_ = static_cast<std::uint32_t*>(nvshmem_calloc(kMostElements, sizeof(std::uint32_t)));
    signal_ = static_cast<std::uint64_t*>(nvshmem_calloc(1, sizeof(std::uint64_t)));
    if (source_ == nullptr || target_ == nullptr || signal_ == nullptr)
      throw std::runtime_error("nvshmem_malloc failed");
    check(cudaStreamCreate(&stream_), "cudaStreamCreate");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  void run(std::size_t elements) {
    ++put_;
    values_.resize(elements);
    for (std::size_t i = 0; i < elements; ++i) values_[i] = element(rank_, put_, i);
    check(cudaMemcpy(source_, values_.data(), bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    barrier_.wait();  // the peer has read what the put before wrote
    nvshmemx_putmem_signal_on_stream(target_, source_, bytes(), signal_, 1, NVSHMEM_SIGNAL_ADD, peer(), stream_);
    wait_until("NVSHMEM to send", [this] { return is_idle(stream_); });
    wait_until("a signal", [this] { return signal() >= put_; });
    compare();
    barrier_.wait();
    if (signal() != put_) ++wrong_signals_;
  }

  bool report() const {
    std::printf("rank %d: %u puts with a signal, %zu elements compared, %zu wrong, %u wrong signals\n", rank_, put_,
                compared_, wrong_, wrong_signals_);
    std::fflush(stdout);
    return wrong_ == 0 && wrong_signals_ == 0;
  }

 private:
  int peer() const { return 1 - rank_; }
  std::size_t bytes() const { return values_.size() * sizeof(std::uint32_t); }

  static bool is_idle(cudaStream_t stream) {
    const cudaError_t result = cudaStreamQuery(stream);
    if (result != cudaErrorNotReady) check(result, "cudaStreamQuery");
    return result == cudaSuccess;
  }

  std::uint64_t signal() const {
    std::uint64_t value = 0;
    check(cudaMemcpy(&value, signal_, sizeof(value), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return value;
  }

  void compare() {
    check(cudaMemcpy(values_.data(), target_, bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (mutate_) values_[put_ % values_.size()] ^= 1U;
    for (std::size_t i = 0; i < values_.size(); ++i) wrong_ += values_[i] != element(peer(), put_, i) ? 1 : 0;
    compared_ += values_.size();
  }

  const int rank_;
  const bool mutate_;
  Barrier& barrier_;
  cudaStream_t stream_ = nullptr;
  std::uint32_t* source_ = nullptr;
  std::uint32_t* target_ = nullptr;
  std::uint64_t* signal_ = nullptr;
  std::vector<std::uint32_t> values_;
  unsigned put_ = 0;
  std::size_t compared_ = 0;
  std::size_t wrong_ = 0;
  unsigned wrong_signals_ = 0;
};

int run_rank(int rank, bool mutate, Shared& shared) try {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // NVSHMEM's log is complete when a rank does not end
  int gpus = 0;
  check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  check(cudaSetDevice(rank % gpus), "cudaSetDevice");
  Barrier barrier(shared.arrived);
  if (rank == 0 && nvshmemx_get_uniqueid(&shared.id) != 0) throw std::runtime_error("nvshmemx_get_uniqueid failed");
  barrier.wait();
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  if (nvshmemx_set_attr_uniqueid_args(rank, kProcesses, &shared.id, &attributes) != 0 ||
      nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes) != 0) {
    throw std::runtime_error("NVSHMEM does not start");
  }
  Puts puts(rank, mutate, barrier);
  for (const std::size_t elements : kElements) {
    for (unsigned repeat = 0; repeat < kRepeats; ++repeat) puts.run(elements);
  }
  const bool right = puts.report();
  barrier.wait();
  std::_Exit(right ? 0
                   : kWrong);  // nvshmem_finalize needs collective calls, which two processes on one GPU do not have
} catch (const std::exception& error) {
  std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
  std::_Exit(1);
}

int run(bool mutate) {
  void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("mmap failed");
  auto* const shared = new (memory) Shared{NVSHMEMX_UNIQUEID_INITIALIZER, {}};
  std::array<pid_t, kProcesses> children{};
  for (int rank = 0; rank < kProcesses; ++rank) {
    children[static_cast<std::size_t>(rank)] = ::fork();
    if (children[static_cast<std::size_t>(rank)] == 0) run_rank(rank, mutate, *shared);
  }
  int worst = 0;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    if (worst == 0 || (code != 0 && code != kWrong)) worst = code;
  }
  return worst;
}

}  // namespace
}  // namespace verbatim::gpu

// nvshmem_put [mutate]: exit status 0 right, 3 wrong elements, otherwise a failure
int main(int count, char** arguments) {
  return verbatim::gpu::run(count > 1 && std::string_view(arguments[1]) == "mutate");
}
