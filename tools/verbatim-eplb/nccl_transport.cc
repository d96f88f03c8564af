// Operations as NCCL's point-to-point calls, in GPU memory. NCCL and CUDA are opened at run time.
#include <sched.h>

#include <cstdlib>

#include "ranks/failure.h"
#include "verbatim-eplb/cuda_memory.h"
#include "verbatim-eplb/shared_library.h"
#include "verbatim-eplb/transport.h"

namespace verbatim::eplb {
namespace {

using ranks::Failure;

// NCCL's public interface as its manual states it.
struct UniqueId {
  char internal[128];
};
using Comm = void*;
using Result = int;
constexpr Result kSuccess = 0;
constexpr Result kInProgress = 7;
constexpr int kUint8 = 1;

struct Functions {
  explicit Functions(const std::string& library) : from(library) {
    from.find("ncclGetVersion", get_version);
    from.find("ncclGetUniqueId", get_unique_id);
    from.find("ncclCommInitRank", comm_init_rank);
    from.find("ncclCommDestroy", comm_destroy);
    from.find("ncclCommGetAsyncError", comm_get_async_error);
    from.find("ncclGetErrorString", get_error_string);
    from.find("ncclGroupStart", group_start);
    from.find("ncclGroupEnd", group_end);
    from.find("ncclSend", send);
    from.find("ncclRecv", recv);
  }
  SharedLibrary from;
  Result (*get_version)(int* version);
  Result (*get_unique_id)(UniqueId* id);
  Result (*comm_init_rank)(Comm* comm, int ranks, UniqueId id, int rank);
  Result (*comm_destroy)(Comm comm);
  Result (*comm_get_async_error)(Comm comm, Result* error);
  const char* (*get_error_string)(Result result);
  Result (*group_start)();
  Result (*group_end)();
  Result (*send)(const void* data, std::size_t count, int type, int peer, Comm comm, void* stream);
  Result (*recv)(void* data, std::size_t count, int type, int peer, Comm comm, void* stream);
};

class NcclTransport final : public Transport {
 public:
  NcclTransport(const Options& options, ranks::Link& link)
      : options_(options), link_(link), memory_(options.cuda, options.job.rank), nccl_(options.nccl) {
    const auto ranks = static_cast<std::size_t>(options.job.nranks);
    counters_.sent.resize(ranks);
    counters_.received.resize(ranks);
    check(nccl_.get_version(&version_), "ncclGetVersion");
  }

  Memory& memory() override { return memory_; }

  // NCCL connects a pair when it first has something to say.
  void connect(const std::set<std::pair<int, int>>&, const std::vector<ranks::Piece>&) override {
    UniqueId id{};
    if (options_.job.rank == 0) check(nccl_.get_unique_id(&id), "ncclGetUniqueId");
    id = link_.all_gather_values(id).front();
    check(nccl_.comm_init_rank(&comm_, options_.job.nranks, id, options_.job.rank), "ncclCommInitRank");
  }

  void run_group(std::span<const Operation> operations, std::size_t) override {
    check(nccl_.group_start(), "ncclGroupStart");
    for (const Operation& operation : operations) {
      for (const Part& part : operation.parts) {
        if (operation.sends) {
          check(nccl_.send(part.data, part.bytes, kUint8, operation.peer, comm_, memory_.stream()), "ncclSend");
        } else {
          check(nccl_.recv(part.data, part.bytes, kUint8, operation.peer, comm_, memory_.stream()), "ncclRecv");
        }
      }
      (operation.sends ? counters_.sent : counters_.received)[static_cast<std::size_t>(operation.peer)] +=
          operation.bytes();
      ++counters_.operations;
    }
    check(nccl_.group_end(), "ncclGroupEnd");
  }

  void finish() override {
    while (!memory_.idle()) {
      Result error = kSuccess;
      check(nccl_.comm_get_async_error(comm_, &error), "ncclCommGetAsyncError");
      if (error != kInProgress) check(error, "NCCL, while operations were under way");
      sched_yield();
    }
  }

  void close() override {
    if (comm_ != nullptr) check(nccl_.comm_destroy(comm_), "ncclCommDestroy");
  }

  ranks::Json describe() const override {
    return {{"over", "nccl"},
            {"version", version()},
            {"net", setting("NCCL_NET")},
            {"net_plugin", setting("NCCL_NET_PLUGIN")},
            {"memory", memory_.describe()}};
  }

 private:
  static std::string setting(const char* name) {
    const char* const value = std::getenv(name);
    return value == nullptr ? "" : value;
  }
  std::string version() const {
    return std::to_string(version_ / 10000) + "." + std::to_string(version_ / 100 % 100) + "." +
           std::to_string(version_ % 100);
  }
  void check(Result result, const char* what) const {
    if (result == kSuccess) return;
    throw Failure(std::string(what) + ": " + nccl_.get_error_string(result));
  }

  const Options& options_;
  ranks::Link& link_;
  CudaMemory memory_;
  const Functions nccl_;
  int version_ = 0;
  Comm comm_ = nullptr;
};

}  // namespace

std::unique_ptr<Transport> make_nccl_transport(const Options& options, ranks::Link& link) {
  return std::make_unique<NcclTransport>(options, link);
}

}  // namespace verbatim::eplb
