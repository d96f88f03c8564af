// NCCL's host calls for one-sided transfers (NCCL 2.29 and later): the CPU starts the transfers, and no kernel runs.
// NCCL's library is opened at run time.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "ncclapi/nccl.h"

namespace verbatim::ncclapi {

// Failures throw ranks::Failure. Used by one thread.
class NcclPuts {
 public:
  using Window = void*;

  explicit NcclPuts(const std::string& library) : nccl_(library) {}

  // Memory that can be in a window.
  std::byte* allocate(std::size_t bytes) const;
  void free(std::byte* data) const;
  // Collective: a window names the memory of all ranks.
  Window add_window(Nccl::Comm comm, std::byte* data, std::size_t bytes) const;
  void remove_window(Nccl::Comm comm, Window window) const;

  // Puts to the peer's memory at `offset` of `window`, then signals. The source is in a window too. It may be changed
  // by operations that follow in `stream`.
  void put_signal(const std::byte* data, std::size_t bytes, int peer, Window window, std::size_t offset,
                  Nccl::Comm comm, memory::Gpu::Stream stream) const;
  // What follows in `stream` waits for so many more signals of each peer.
  struct Signals {
    int count;
    int peer;
  };
  void wait(const std::vector<Signals>& signals, Nccl::Comm comm, memory::Gpu::Stream stream) const;

 private:
  using Result = int;
  // NCCL's public interface as its manual defines it.
  struct WaitDescription {
    int count;
    int peer;
    int signal;
    int context;
  };
  struct Functions {
    explicit Functions(const std::string& library);
    ranks::SharedLibrary from;
    const char* (*error_string)(Result result);
    Result (*allocate)(void** data, std::size_t bytes);
    Result (*free)(void* data);
    Result (*add_window)(Nccl::Comm comm, void* data, std::size_t bytes, Window* window, int flags);
    Result (*remove_window)(Nccl::Comm comm, Window window);
    Result (*put_signal)(const void* data, std::size_t count, int type, int peer, Window window, std::size_t offset,
                         int signal, int context, unsigned flags, Nccl::Comm comm, memory::Gpu::Stream stream);
    Result (*wait_signal)(int count, WaitDescription* descriptions, Nccl::Comm comm, memory::Gpu::Stream stream);
  };
  void check(Result result, const char* what) const;

  const Functions nccl_;
};

}  // namespace verbatim::ncclapi
