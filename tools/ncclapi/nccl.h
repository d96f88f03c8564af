// NCCL's point-to-point calls. NCCL's library is opened at run time.
#pragma once

#include <cstddef>
#include <string>

#include "memory/gpu.h"
#include "ranks/shared_library.h"

namespace verbatim::ncclapi {

// Of NCCL's public interface.
inline constexpr int kNcclSuccess = 0;
inline constexpr int kNcclInProgress = 7;
inline constexpr int kNcclUint8 = 1;

// Failures throw ranks::Failure. Used by one thread.
class Nccl {
 public:
  struct UniqueId {
    char internal[128];
  };
  using Comm = void*;

  explicit Nccl(const std::string& library) : nccl_(library) {}

  std::string version() const;  // "2.28.3"
  UniqueId make_id() const;
  Comm init(int ranks, const UniqueId& id, int rank) const;
  void destroy(Comm comm) const;
  void group_start() const;
  void group_end() const;
  void send(const std::byte* data, std::size_t bytes, int peer, Comm comm, memory::Gpu::Stream stream) const;
  void recv(std::byte* data, std::size_t bytes, int peer, Comm comm, memory::Gpu::Stream stream) const;
  // Throws when the communicator has had an asynchronous error.
  void check_async(Comm comm) const;

 private:
  using Result = int;
  // NCCL's public interface as its manual defines it.
  struct Functions {
    explicit Functions(const std::string& library);
    ranks::SharedLibrary from;
    Result (*version)(int* version);
    Result (*get_id)(UniqueId* id);
    Result (*init)(Comm* comm, int ranks, UniqueId id, int rank);
    Result (*destroy)(Comm comm);
    Result (*async_error)(Comm comm, Result* error);
    const char* (*error_string)(Result result);
    Result (*group_start)();
    Result (*group_end)();
    Result (*send)(const void* data, std::size_t count, int type, int peer, Comm comm, memory::Gpu::Stream stream);
    Result (*recv)(void* data, std::size_t count, int type, int peer, Comm comm, memory::Gpu::Stream stream);
  };
  void check(Result result, const char* what) const;

  const Functions nccl_;
};

}  // namespace verbatim::ncclapi
