#include "rank.h"

#include <cuda_runtime.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

#include "operations.h"

namespace verbatim::gpu {
namespace {

// No pattern is likely to hold it many times, and a word that was never written shows.
constexpr unsigned char kPoison = 0xa5;
// Every call checked on its own before the timed ones; iteration numbers start here so that no content repeats.
constexpr unsigned kCheckedCalls = 2;

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

void check(ncclResult_t result, const char* what) {
  if (result != ncclSuccess) {
    throw std::runtime_error(std::string(what) + ": " + ncclGetErrorString(result) + " (" + ncclGetLastError(nullptr) +
                             ")");
  }
}

void send_report(int socket, const Report& report) {
  if (send(socket, &report, sizeof report, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof report)) {
    throw std::runtime_error("the parent has gone");
  }
}

Report text_report(Report::Kind kind, const std::string& text) {
  Report report{};
  report.kind = kind;
  std::snprintf(report.text, sizeof report.text, "%s", text.c_str());
  return report;
}

// Rank 0 makes the id (it hosts NCCL's bootstrap from then on); the parent passes it to the others.
ncclUniqueId agree_on_id(int rank, int socket) {
  Report report{};
  report.kind = Report::Kind::kId;
  if (rank == 0) {
    check(ncclGetUniqueId(&report.id), "ncclGetUniqueId");
    send_report(socket, report);
  } else if (recv(socket, &report, sizeof report, 0) != static_cast<ssize_t>(sizeof report)) {
    throw std::runtime_error("the parent has gone");
  }
  return report.id;
}

class Rank {
 public:
  Rank(const Plan& plan, Place place, int socket) : plan_(plan), place_(place), socket_(socket) {
    int gpus = 0;
    check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
    if (gpus == 0) throw std::runtime_error("no GPU");
    gpu_ = place.rank % gpus;
    check(cudaSetDevice(gpu_), "cudaSetDevice");
    check(ncclCommInitRank(&comm_, place.ranks, agree_on_id(place.rank, socket), place.rank), "ncclCommInitRank");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaMalloc(reinterpret_cast<void**>(&send_), plan.last_bytes), "cudaMalloc");
    check(cudaMalloc(reinterpret_cast<void**>(&receive_), plan.last_bytes), "cudaMalloc");
    host_.resize(plan.last_bytes / sizeof(Element));
  }

  void run() {
    for (const std::size_t operation : plan_.operations) {
      for (std::size_t bytes = plan_.first_bytes; bytes <= plan_.last_bytes; bytes *= plan_.factor) {
        run_size(operation, bytes / sizeof(Element));
      }
    }
  }

  // The process ends right after: what CUDA and NCCL still hold goes with it when an error kept us from coming here.
  void close() {
    check(cudaFree(send_), "cudaFree");
    check(cudaFree(receive_), "cudaFree");
    check(ncclCommFinalize(comm_), "ncclCommFinalize");
    check(ncclCommDestroy(comm_), "ncclCommDestroy");
    check(cudaStreamDestroy(stream_), "cudaStreamDestroy");
  }

  std::string describe() const {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, gpu_), "cudaGetDeviceProperties");
    int version = 0;
    check(ncclGetVersion(&version), "ncclGetVersion");
    return "GPU " + std::to_string(gpu_) + " (" + properties.name + "), NCCL " + std::to_string(version / 10000) + "." +
           std::to_string(version / 100 % 100) + "." + std::to_string(version % 100);
  }

 private:
  void run_size(std::size_t operation_index, std::size_t count) {
    const Operation& operation = kOperations[operation_index];
    const auto ranks = static_cast<std::size_t>(place_.ranks);
    if (operation.count_is_multiple_of_ranks) count -= count % ranks;
    if (count == 0) return;  // fewer elements than ranks
    const Call call{send_, receive_, count, place_, comm_, stream_};

    Report row{};
    row.kind = Report::Kind::kRow;
    row.operation = static_cast<std::uint32_t>(operation_index);
    row.count = count;
    for (unsigned checked = 0; checked < kCheckedCalls; ++checked) {
      prepare(count);
      check(operation.enqueue(call), operation.name);
      wait();
      row.wrong += count_wrong(operation, count);
      row.checked += count;
    }

    prepare(count);
    const auto start = std::chrono::steady_clock::now();
    for (unsigned iteration = 0; iteration < plan_.iterations; ++iteration) {
      check(operation.enqueue(call), operation.name);
    }
    wait();
    const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
    row.microseconds = elapsed.count() / plan_.iterations;
    row.wrong += count_wrong(operation, count);
    row.checked += count;
    send_report(socket_, row);
  }

  // New contents, never used before, in the send buffer; poison in the whole receive buffer.
  void prepare(std::size_t count) {
    ++iteration_;
    for (std::size_t index = 0; index < count; ++index) host_[index] = pattern(place_.rank, iteration_, index);
    check(cudaMemcpy(send_, host_.data(), count * sizeof(Element), cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaMemset(receive_, kPoison, plan_.last_bytes), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  // Waits for the stream, and for NCCL's own verdict: when the network fails its kernel never ends.
  void wait() {
    cudaError_t state = cudaErrorNotReady;
    while ((state = cudaStreamQuery(stream_)) == cudaErrorNotReady) {
      ncclResult_t verdict = ncclSuccess;
      check(ncclCommGetAsyncError(comm_, &verdict), "ncclCommGetAsyncError");
      if (verdict != ncclInProgress) check(verdict, "NCCL reports asynchronously");
    }
    check(state, "cudaStreamQuery");
  }

  // Compares every element of the result, and that nothing was written behind it.
  std::uint64_t count_wrong(const Operation& operation, std::size_t count) {
    check(cudaMemcpy(host_.data(), receive_, plan_.last_bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (plan_.mutate) host_[iteration_ % count] ^= Element{1} << (iteration_ % 32U);
    Element poison{};
    std::memset(&poison, kPoison, sizeof poison);
    std::uint64_t wrong = 0;
    for (std::size_t index = 0; index < count; ++index) {
      if (host_[index] != operation.expected(place_, iteration_, index, count)) ++wrong;
    }
    const auto behind = host_.begin() + static_cast<std::ptrdiff_t>(count);
    wrong += static_cast<std::uint64_t>(std::count_if(behind, host_.end(), [&](Element e) { return e != poison; }));
    return wrong;
  }

  const Plan& plan_;
  const Place place_;
  const int socket_;
  int gpu_ = 0;
  unsigned iteration_ = 0;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  Element* send_ = nullptr;
  Element* receive_ = nullptr;
  std::vector<Element> host_;
};

}  // namespace

int run_rank(const Plan& plan, int rank, int socket) {
  try {
    Rank self(plan, Place{rank, plan.ranks}, socket);
    self.run();
    const std::string description = self.describe();
    self.close();
    send_report(socket, text_report(Report::Kind::kDone, description));
    return 0;
  } catch (const std::exception& error) {
    const Report report = text_report(Report::Kind::kError, error.what());
    if (send(socket, &report, sizeof report, MSG_NOSIGNAL) < 0)
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    return 1;
  }
}

}  // namespace verbatim::gpu
