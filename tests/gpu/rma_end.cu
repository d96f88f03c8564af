// What ends a kernel, or a stream, that waits for a rank that was killed. Two ranks put to each other, by a kernel
// (device: NCCL's device API) or by NCCL's host calls (host: ncclPutSignal, ncclWaitSignal). After some rounds rank 1
// is killed. Rank 0 has more rounds to do. It prints when ncclCommGetAsyncError reports an error, and what ends its
// work:
//
//   device  NCCL 2.30.7 gives the kernels of applications no abort flag (ncclDevComm::abortFlag is set for NCCL's own),
//           so neither its functions that wait nor ncclCommAbort end them. This kernel waits in a loop of its own,
//           which a flag in host memory ends; then ncclCommAbort, and another kernel
//   host    ncclCommAbort, cudaDeviceReset, and at last the end of the process, each with a limit
//
//   rma_end device|host RANK DIRECTORY    exit status of rank 0: 0 when the error was reported within 2 s, and in the
//   mode
//                                         device the kernel has ended and the GPU works
#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "cuda_check.h"

namespace verbatim::gpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kBytes = 64 << 10;  // of a put
constexpr std::uint64_t kRoundsOfRank1 = 100;
constexpr std::uint64_t kRoundsOfRank0 = 200;
constexpr double kErrorLimit = 2;  // seconds, for the report
constexpr double kErrorPatience = 20;
constexpr double kEndLimit = 10;

void check(ncclResult_t result, const char* what) {
  if (result != ncclSuccess) throw std::runtime_error(std::string(what) + ": " + ncclGetErrorString(result));
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// In host memory, for one warp.
struct Control {
  volatile std::uint64_t done = 0;  // rounds
  volatile bool stop = false;
};

__global__ void put_rounds(ncclDevComm comm, ncclWindow_t window, std::uint64_t rounds, Control* control) {
  const ncclGin gin{comm, 0};
  const int peer = 1 - comm.rank;
  const std::uint64_t before = gin.readSignal(0);
  for (std::uint64_t round = 1; round <= rounds; ++round) {
    if (threadIdx.x == 0) {
      gin.put(ncclTeamWorld(comm), peer, window, kBytes, window, 0, kBytes, ncclGin_WeakSignalInc{0});
    }
    while (gin.readSignal(0) < before + round) {
      if (control->stop) return;
    }
    __syncthreads();
    gin.flush(ncclCoopCta());
    if (threadIdx.x == 0) control->done = round;
  }
}

__global__ void count_up(int* value) {
  atomicAdd(value, 1);
}

class Rank {
 public:
  Rank(bool device, int rank, const std::string& directory) : device_(device), rank_(rank) {
    int gpus = 0;
    gpu::check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
    gpu::check(cudaSetDevice(rank % gpus), "cudaSetDevice");
    check(ncclCommInitRank(&comm_, 2, exchange_id(directory), rank), "ncclCommInitRank");
    check(ncclMemAlloc(&memory_, 2 * kBytes), "ncclMemAlloc");
    check(ncclCommWindowRegister(comm_, memory_, 2 * kBytes, &window_, NCCL_WIN_COLL_SYMMETRIC),
          "ncclCommWindowRegister");
    gpu::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    gpu::check(cudaHostAlloc(reinterpret_cast<void**>(&control_), sizeof *control_, cudaHostAllocMapped),
               "cudaHostAlloc");
    new (control_) Control;
    if (!device) return;
    ncclDevCommRequirements requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    requirements.ginSignalCount = 1;
    requirements.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
    check(ncclDevCommCreate(comm_, &requirements, &device_comm_), "ncclDevCommCreate");
  }

  void start() {
    const std::uint64_t rounds = rank_ == 0 ? kRoundsOfRank0 : kRoundsOfRank1;
    if (device_) {
      put_rounds<<<1, 32, 0, stream_>>>(device_comm_, window_, rounds, control_);
      return gpu::check(cudaGetLastError(), "the kernel");
    }
    for (std::uint64_t i = 0; i < rounds; ++i) {
      check(ncclPutSignal(memory_, kBytes, ncclUint8, 1 - rank_, window_, kBytes, 0, 0, 0, comm_, stream_),
            "ncclPutSignal");
      ncclWaitSignalDesc_t signal{1, 1 - rank_, 0, 0};
      check(ncclWaitSignal(1, &signal, comm_, stream_), "ncclWaitSignal");
    }
  }

  bool has_ended() const { return cudaStreamQuery(stream_) != cudaErrorNotReady; }

  bool wait(double limit) const {
    const auto begin = Clock::now();
    while (!has_ended() && seconds_since(begin) < limit) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return has_ended();
  }

  // Rank 0, whose peer is being killed.
  bool observe() {
    const auto begin = Clock::now();
    ncclResult_t error = ncclSuccess;
    while (error == ncclSuccess && seconds_since(begin) < kErrorPatience && !has_ended()) {
      check(ncclCommGetAsyncError(comm_, &error), "ncclCommGetAsyncError");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const double reported = seconds_since(begin);
    std::printf("# ncclCommGetAsyncError: %s, %.2f s after the launch", ncclGetErrorString(error), reported);
    if (device_) std::printf(", %llu rounds done", static_cast<unsigned long long>(control_->done));
    std::printf("\n# the work has %s 1 s later\n", wait(1) ? "ended" : "not ended");
    const bool in_time = error != ncclSuccess && reported <= kErrorLimit;
    return (device_ ? stop_kernel() : end_stream()) && in_time;
  }

 private:
  // False: the kernel does not end, or the GPU does not work.
  bool stop_kernel() {
    control_->stop = true;
    const bool ended = wait(kEndLimit);
    std::printf("# the kernel's own flag is set: it has %s\n", ended ? "ended" : "not ended");
    if (!ended) return false;
    const double seconds = in_time([this] { check(ncclCommAbort(comm_), "ncclCommAbort"); });
    if (seconds < 0) return false;
    std::printf("# ncclCommAbort returned after %.2f s\n", seconds);
    return gpu_works();
  }

  bool end_stream() {
    const double aborted = in_time([this] { static_cast<void>(ncclCommAbort(comm_)); });
    report("ncclCommAbort", aborted);
    if (!has_ended()) {
      const double reset = in_time([] { static_cast<void>(cudaDeviceReset()); });
      report("cudaDeviceReset", reset);
      std::printf("# the process ends\n");
    }
    return true;
  }

  void report(const char* call, double seconds) const {
    if (seconds < 0) {
      std::printf("# %s has not returned after %.0f s", call, kEndLimit);
    } else {
      std::printf("# %s returned after %.2f s", call, seconds);
    }
    std::printf(", the stream has %s\n", has_ended() ? "ended" : "not ended");
    std::fflush(stdout);
  }

  // Calls it in another thread. Returns the seconds that it took; -1: more than the limit.
  template <typename Call>
  static double in_time(Call call) {
    const auto begin = Clock::now();
    auto returned = std::make_shared<std::atomic<bool>>(false);
    std::thread([call, returned] {
      call();
      *returned = true;
    }).detach();
    while (!*returned && seconds_since(begin) < kEndLimit) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return *returned ? seconds_since(begin) : -1;
  }

  ncclUniqueId exchange_id(const std::string& directory) const {
    const std::string path = directory + "/id";
    ncclUniqueId id{};
    if (rank_ == 0) {
      check(ncclGetUniqueId(&id), "ncclGetUniqueId");
      std::ofstream(path + ".new", std::ios::binary).write(reinterpret_cast<const char*>(&id), sizeof id);
      if (std::rename((path + ".new").c_str(), path.c_str()) != 0)
        throw std::runtime_error(path + " cannot be written");
      return id;
    }
    std::ifstream file;
    for (int i = 0; i < 600 && !file.is_open(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      file.open(path, std::ios::binary);
    }
    if (!file.read(reinterpret_cast<char*>(&id), sizeof id)) throw std::runtime_error(path + " cannot be read");
    return id;
  }

  static bool gpu_works() {
    int* value = nullptr;
    int sum = 0;
    gpu::check(cudaMalloc(&value, sizeof *value), "cudaMalloc");
    gpu::check(cudaMemset(value, 0, sizeof *value), "cudaMemset");
    count_up<<<4, 256>>>(value);
    gpu::check(cudaMemcpy(&sum, value, sizeof sum, cudaMemcpyDeviceToHost), "a kernel after the abort");
    std::printf("# another kernel after it: %d of 1024\n", sum);
    return sum == 1024;
  }

  const bool device_;
  const int rank_;
  ncclComm_t comm_ = nullptr;
  ncclDevComm device_comm_{};
  void* memory_ = nullptr;
  ncclWindow_t window_ = nullptr;
  cudaStream_t stream_ = nullptr;
  Control* control_ = nullptr;
};

int run(const std::string& mode, int number, const std::string& directory) {
  Rank rank(mode == "device", number, directory);
  rank.start();
  if (number == 0) {
    const bool good = rank.observe();
    std::fflush(stdout);
    std::_Exit(good ? 0 : 1);  // threads may be in calls that do not return
  }
  if (!rank.wait(kEndLimit)) throw std::runtime_error("the rounds of rank 1 did not end");
  ::raise(SIGKILL);
  return 1;
}

}  // namespace
}  // namespace verbatim::gpu

int main(int argc, char** argv) {
  const std::string mode = argc == 4 ? argv[1] : "";
  if (mode != "device" && mode != "host") {
    std::fprintf(stderr, "usage: rma_end device|host RANK DIRECTORY\n");
    return 2;
  }
  try {
    return verbatim::gpu::run(mode, std::atoi(argv[2]), argv[3]);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "rma_end, rank %s: %s\n", argv[2], failure.what());
    return 3;
  }
}
