// What is compared: RDMA WRITEs between two processes, the bare system call that can do the same, and memcpy, all over
// the same pages; and an 8-byte WRITE there and back beside the same with plain stores.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "softverbs-bench/endpoint.h"

namespace verbatim::bench {

// Shared by both processes, which map it before they part. The flags of the ping-pongs lie on cache lines of their own.
struct Area {
  static constexpr std::size_t kWindowBytes = std::size_t{8} << 20;  // more than the inner caches hold

  alignas(4096) std::byte source[kWindowBytes];
  alignas(4096) std::byte target[kWindowBytes];
  alignas(64) std::atomic<std::uint64_t> outgoing[2];  // by side: what it writes from
  alignas(64) std::atomic<std::uint64_t> ping;
  alignas(64) std::atomic<std::uint64_t> pong;
};

enum class CopyMethod : std::uint8_t { kMemcpy, kProcessVm, kVerbs };

// Moves the window once, in pieces of `piece` bytes. Returns when the last byte is there.
class Bandwidth {
 public:
  // WRITEs go round the endpoints.
  Bandwidth(Area& area, std::vector<Endpoint>& endpoints, pid_t peer)
      : area_(area), endpoints_(endpoints), peer_(peer) {}

  // Bytes per second over `passes` of the window.
  Result<double> measure(CopyMethod method, std::size_t piece, unsigned passes);
  // Moves a window of new contents and compares every byte.
  Result<bool> is_copy_correct(CopyMethod method, std::size_t piece);

 private:
  Status pass(CopyMethod method, std::size_t piece);
  Status write_window(std::size_t piece);
  Status process_vm_window(std::size_t piece);

  Area& area_;
  std::vector<Endpoint>& endpoints_;
  pid_t peer_;
};

// 8-byte WRITEs a second, as many under way as the send queues hold.
Result<double> message_rate(std::vector<Endpoint>& endpoints, std::uint64_t count);

enum class Side : std::uint8_t { kPing, kPong };

// Each side of `rounds` exchanges of 8 bytes. Nanoseconds one way at the side that starts.
Result<double> verbs_ping_pong(Area& area, Endpoint& endpoint, Side side, std::uint64_t rounds);
double memory_ping_pong(Area& area, Side side, std::uint64_t rounds);

}  // namespace verbatim::bench
