// The fixture: the conformance suite's, with memory at any place and with flushes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "buffer.h"
#include "conformance.h"
#include "peer.h"
#include "process.h"

namespace gpu_direct {

using conformance::Clock;
using conformance::eventually;
using conformance::Operation;
using conformance::Part;
using conformance::TestConnection;
using conformance::Traffic;

// Registers bytes of a buffer in the buffer's way. `fd`: the dma-buf in place of the right one.
nccl::Result register_memory(netapi::Plugin& net, void* comm, unsigned char* data, std::size_t bytes,
                             const Place& place, void** mhandle, std::optional<int> fd = {}, CUdeviceptr start = 0);

// One operation that may fail: posts it and polls until it is done. `request` may be given. kInternalError with a
// failure of the test after the deadline.
nccl::Result post_and_wait(netapi::Plugin& net, void* comm, bool is_send, Part part, int* size);
nccl::Result flush_and_wait(netapi::Plugin& net, void* comm, Part part);

class Registered {
 public:
  Registered(conformance::Conformance& test, void* comm, Buffer& buffer)
      : Registered(test, comm, buffer, 0, buffer.size()) {}
  Registered(conformance::Conformance& test, void* comm, Buffer& buffer, std::size_t at, std::size_t bytes);
  ~Registered() { release(); }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;

  void* get() const { return mhandle_; }
  void release();

 private:
  conformance::Conformance& test_;
  void* const comm_;
  void* mhandle_ = nullptr;
};

struct Route {
  Place from;
  Place to;
  std::optional<Place> odd_to = {};  // of the odd members of groups
  std::size_t send_offset = 0;       // from a page boundary
  std::size_t recv_offset = 0;
};

class GpuTest : public conformance::Conformance {
 public:
  // Each element of `groups` has the sizes of one grouped receive, flushed when it is done.
  void exchange(TestConnection& link, const std::vector<std::vector<std::size_t>>& groups, const Route& route);
  // Sends one message between registered buffers, flushes it and compares both.
  void exchange_one(TestConnection& link, Buffer& source, void* source_mr, Buffer& target, void* target_mr,
                    std::size_t from, std::size_t to, std::size_t size);
  // Polls until all operations and the flushes of these receives are done.
  void run(Traffic& traffic, const std::vector<const Operation*>& receives);
  // Two connections between this process and `peer`: one to it, and one from it.
  TestConnection connect_to(PeerProcess& peer);
  int network_devices() { return std::max(1, device_count()); }

  // Whether softverbs was started to take regMr of GPU memory.
  static bool takes_plain();
  static bool takes_dmabuf();
  static std::vector<How> ways();

 protected:
  std::uint64_t seed_ = 100;
};

// GPU numbers of the tests; both are on GPU 0 on a machine with one.
int second_gpu();

inline std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

// A kernel that spins on both GPUs while it lives, 15 s at most: then a call that waits for it returns, and the test
// fails instead of hanging.
class SpinningKernels {
 public:
  SpinningKernels();
  ~SpinningKernels();
  SpinningKernels(const SpinningKernels&) = delete;
  SpinningKernels& operator=(const SpinningKernels&) = delete;
  // Calls of this process that have waited for a kernel; one at most: softverbs' thread that maps memory of other GPUs.
  unsigned long long waits() const;
  unsigned long long pageable_copies() const;

 private:
  static void end();

  const unsigned long long waits_;
  const unsigned long long pageable_copies_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_ended_ = false;
  std::thread watchdog_;
};

#define TWO_VERSIONS(suite) INSTANTIATE_TEST_SUITE_P(Net, suite, ::testing::Values(8, 12), ::conformance::version_name)

}  // namespace gpu_direct
