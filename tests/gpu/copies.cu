// A bare loop of copies from GPU to GPU, with which the bandwidth of NCCL over softverbs is compared: pieces of one
// size, a number of them in flight, direct or staged through pinned host memory. Two processes, one for each direction,
// run at the same time, as two ranks do. With one GPU they copy within it.
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "cuda_check.h"

namespace verbatim::gpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::array<unsigned, 6> kInFlight{1, 4, 8, 16, 32, 64};
constexpr unsigned kMostInFlight = kInFlight.back();
constexpr unsigned kProcesses = 2;
constexpr auto kDeadline = std::chrono::seconds(30);

struct Options {
  std::size_t piece = std::size_t{128} << 10U;
  double seconds = 0.25;  // of each measurement
};

// Of both processes.
struct Shared {
  std::atomic<unsigned> arrived;
  std::atomic<bool> failed;
  std::array<std::atomic<double>, kProcesses> rates;  // bytes per second
};

// All processes call it with `round` counted from 1.
void barrier(Shared& shared, unsigned round) {
  const auto deadline = Clock::now() + kDeadline;
  shared.arrived.fetch_add(1);
  while (shared.arrived.load() < round * kProcesses) {
    if (shared.failed.load() || Clock::now() > deadline) throw std::runtime_error("the other process has failed");
    usleep(100);
  }
}

// The copies of one direction. Nothing is freed: the process ends.
class Direction {
 public:
  Direction(unsigned process, const Options& options);

  double direct(unsigned in_flight);
  double staged(unsigned in_flight);

 private:
  // Bytes per second of `copy(slot)`, which copies a piece and records last_[slot].
  template <typename Copy>
  double measure(unsigned in_flight, const Copy& copy);

  const Options options_;
  int own_gpu_ = 0;
  int peer_gpu_ = 0;
  std::byte* source_ = nullptr;  // on the own GPU
  std::byte* target_ = nullptr;  // on the peer's
  std::byte* pinned_ = nullptr;
  cudaStream_t direct_stream_ = nullptr;
  cudaStream_t to_host_stream_ = nullptr;
  cudaStream_t from_host_stream_ = nullptr;  // on the peer's GPU
  std::array<cudaEvent_t, kMostInFlight> on_host_{};
  std::array<cudaEvent_t, kMostInFlight> direct_done_{};
  std::array<cudaEvent_t, kMostInFlight> staged_done_{};  // on the peer's GPU
};

void make_events(std::array<cudaEvent_t, kMostInFlight>& events) {
  for (cudaEvent_t& event : events) {
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  }
}

Direction::Direction(unsigned process, const Options& options) : options_(options) {
  int gpus = 0;
  check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  if (gpus == 0) throw std::runtime_error("no GPU");
  own_gpu_ = gpus > 1 ? static_cast<int>(process) : 0;
  peer_gpu_ = gpus > 1 ? static_cast<int>(1 - process) : 0;
  const std::size_t bytes = kMostInFlight * options.piece;
  void* memory = nullptr;

  check(cudaSetDevice(peer_gpu_), "cudaSetDevice");
  check(cudaMalloc(&memory, bytes), "cudaMalloc");
  target_ = static_cast<std::byte*>(memory);
  check(cudaStreamCreateWithFlags(&from_host_stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  make_events(staged_done_);

  check(cudaSetDevice(own_gpu_), "cudaSetDevice");
  if (own_gpu_ != peer_gpu_) {
    int possible = 0;
    check(cudaDeviceCanAccessPeer(&possible, own_gpu_, peer_gpu_), "cudaDeviceCanAccessPeer");
    if (possible != 0) check(cudaDeviceEnablePeerAccess(peer_gpu_, 0), "cudaDeviceEnablePeerAccess");
    if (process == 0)
      std::printf("# from GPU 0 to GPU 1, peer access %s\n", possible != 0 ? "possible" : "NOT possible");
  } else if (process == 0) {
    std::printf("# one GPU: within its memory\n");
  }
  check(cudaMalloc(&memory, bytes), "cudaMalloc");
  source_ = static_cast<std::byte*>(memory);
  check(cudaMallocHost(&memory, bytes), "cudaMallocHost");
  pinned_ = static_cast<std::byte*>(memory);
  check(cudaStreamCreateWithFlags(&direct_stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaStreamCreateWithFlags(&to_host_stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  make_events(on_host_);
  make_events(direct_done_);
  std::fflush(stdout);
}

template <typename Copy>
double Direction::measure(unsigned in_flight, const Copy& copy) {
  constexpr std::uint64_t kWarmUp = 2 * kMostInFlight;
  std::uint64_t done = 0;
  std::uint64_t posted = 0;
  auto start = Clock::now();
  for (double elapsed = 0; elapsed < options_.seconds;) {
    if (posted >= done + in_flight) {
      const cudaEvent_t event = copy.done(done % in_flight);
      cudaError_t state = cudaEventQuery(event);
      while (state == cudaErrorNotReady) state = cudaEventQuery(event);
      check(state, "cudaEventQuery");
      ++done;
      if (done == kWarmUp) start = Clock::now();
      if (done > kWarmUp) elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    }
    copy.post(posted % in_flight);
    ++posted;
  }
  const double rate = static_cast<double>((done - kWarmUp) * options_.piece) /
                      std::chrono::duration<double>(Clock::now() - start).count();
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return rate;
}

double Direction::direct(unsigned in_flight) {
  struct {
    Direction& d;
    cudaEvent_t done(std::uint64_t slot) const { return d.direct_done_[slot]; }
    void post(std::uint64_t slot) const {
      const std::size_t at = slot * d.options_.piece;
      check(cudaMemcpyAsync(d.target_ + at, d.source_ + at, d.options_.piece, cudaMemcpyDefault, d.direct_stream_),
            "cudaMemcpyAsync");
      check(cudaEventRecord(d.direct_done_[slot], d.direct_stream_), "cudaEventRecord");
    }
  } const copy{*this};
  return measure(in_flight, copy);
}

double Direction::staged(unsigned in_flight) {
  struct {
    Direction& d;
    cudaEvent_t done(std::uint64_t slot) const { return d.staged_done_[slot]; }
    void post(std::uint64_t slot) const {
      const std::size_t at = slot * d.options_.piece;
      check(
          cudaMemcpyAsync(d.pinned_ + at, d.source_ + at, d.options_.piece, cudaMemcpyDeviceToHost, d.to_host_stream_),
          "cudaMemcpyAsync to the host");
      check(cudaEventRecord(d.on_host_[slot], d.to_host_stream_), "cudaEventRecord");
      // Events and streams belong to a GPU; the other one may wait for the event.
      check(cudaSetDevice(d.peer_gpu_), "cudaSetDevice");
      check(cudaStreamWaitEvent(d.from_host_stream_, d.on_host_[slot], 0), "cudaStreamWaitEvent");
      check(cudaMemcpyAsync(d.target_ + at, d.pinned_ + at, d.options_.piece, cudaMemcpyHostToDevice,
                            d.from_host_stream_),
            "cudaMemcpyAsync from the host");
      check(cudaEventRecord(d.staged_done_[slot], d.from_host_stream_), "cudaEventRecord");
      check(cudaSetDevice(d.own_gpu_), "cudaSetDevice");
    }
  } const copy{*this};
  const double rate = measure(in_flight, copy);
  check(cudaSetDevice(peer_gpu_), "cudaSetDevice");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  check(cudaSetDevice(own_gpu_), "cudaSetDevice");
  return rate;
}

void run_process(unsigned process, Shared& shared, const Options& options) {
  Direction direction(process, options);
  unsigned round = 0;
  if (process == 0) {
    std::printf("# copies of %zu bytes, GB/s in each direction\n#%10s %16s %16s %16s %16s\n", options.piece,
                "in flight", "direct one way", "direct", "staged one way", "staged");
  }
  for (const unsigned in_flight : kInFlight) {
    std::array<double, 4> columns{};
    for (std::size_t column = 0; column < columns.size(); ++column) {
      const bool one_way = column % 2 == 0;
      barrier(shared, ++round);
      double rate = 0;
      if (process == 0 || !one_way) rate = column < 2 ? direction.direct(in_flight) : direction.staged(in_flight);
      shared.rates[process].store(rate);
      barrier(shared, ++round);
      const double sum = shared.rates[0].load() + shared.rates[1].load();
      columns[column] = sum / (one_way ? 1 : kProcesses) / 1e9;
      barrier(shared, ++round);  // the rates have been read
    }
    if (process == 0) {
      std::printf("copies %4u %16.2f %16.2f %16.2f %16.2f\n", in_flight, columns[0], columns[1], columns[2],
                  columns[3]);
      std::fflush(stdout);
    }
  }
}

int run_and_report(unsigned process, Shared& shared, const Options& options) {
  try {
    run_process(process, shared, options);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    shared.failed.store(true);
    std::printf("copies: process %u: %s\n", process, error.what());
    return EXIT_FAILURE;
  }
}

}  // namespace
}  // namespace verbatim::gpu

int main(int argc, char** argv) {
  using namespace verbatim::gpu;
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view name = argv[i];
    if (name == "--piece") options.piece = std::strtoull(argv[i + 1], nullptr, 10);
    if (name == "--seconds") options.seconds = std::atof(argv[i + 1]);
  }
  if (argc % 2 == 0 || options.piece == 0) {
    std::printf("usage: copies [--piece BYTES] [--seconds SECONDS]\nA bare loop of copies from GPU to GPU.\n");
    return 2;
  }
  alarm(120);
  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    return EXIT_FAILURE;
  }
  Shared& shared = *new (memory) Shared{};
  const pid_t second = fork();
  if (second < 0) {
    std::perror("fork");
    return EXIT_FAILURE;
  }
  if (second == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    return run_and_report(1, shared, options);
  }
  const int status = run_and_report(0, shared, options);
  int second_status = 0;
  waitpid(second, &second_status, 0);
  return status == EXIT_SUCCESS && second_status == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
