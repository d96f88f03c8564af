// The measurements: bandwidth of RDMA WRITEs between two processes, of process_vm_writev and of memcpy, over the same
// pages; latency of an 8-byte ping-pong with WRITEs and with plain stores to shared memory.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "softverbs-bench/endpoint.h"

namespace verbatim::bench {

// Mapped before the fork and shared by both processes. The words of the ping-pongs lie on separate cache lines.
struct Area {
  static constexpr std::size_t kWindowBytes = std::size_t{8} << 20;  // larger than L1 and L2

  alignas(4096) std::byte source[kWindowBytes];
  alignas(4096) std::byte target[kWindowBytes];
  alignas(64) std::atomic<std::uint64_t> outgoing[2];  // the source of each side's WRITEs
  alignas(64) std::atomic<std::uint64_t> ping;
  alignas(64) std::atomic<std::uint64_t> pong;
};

enum class CopyMethod : std::uint8_t { kMemcpy, kProcessVm, kVerbs };

// Copies the window in pieces of `piece` bytes. One pass ends when the last byte has arrived.
class Bandwidth {
 public:
  // WRITEs use the endpoints in turn.
  Bandwidth(Area& area, std::vector<Endpoint>& endpoints, pid_t peer)
      : area_(area), endpoints_(endpoints), peer_(peer) {}

  // Bytes per second over `passes` of the window.
  Result<double> measure(CopyMethod method, std::size_t piece, unsigned passes);
  // Copies a window of random contents and compares every byte.
  Result<bool> is_copy_correct(CopyMethod method, std::size_t piece);

 private:
  Status pass(CopyMethod method, std::size_t piece);
  Status write_window(std::size_t piece);
  Status process_vm_window(std::size_t piece);

  Area& area_;
  std::vector<Endpoint>& endpoints_;
  pid_t peer_;
};

// 8-byte WRITEs per second, with as many outstanding as the send queues hold.
Result<double> message_rate(std::vector<Endpoint>& endpoints, std::uint64_t count);

enum class Side : std::uint8_t { kPing, kPong };

// Both sides call it for `rounds` exchanges of 8 bytes. The kPing side returns the one-way latency in nanoseconds.
Result<double> verbs_ping_pong(Area& area, Endpoint& endpoint, Side side, std::uint64_t rounds);
double memory_ping_pong(Area& area, Side side, std::uint64_t rounds);

}  // namespace verbatim::bench
