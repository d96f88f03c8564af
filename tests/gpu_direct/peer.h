// The other process of a test: role "peer". It has one connection in each direction and one buffer, and does what the
// test asks for, one command at a time.
#pragma once

#include <string>

#include "buffer.h"
#include "conformance.h"
#include "process.h"

namespace gpu_direct {

struct Command {
  enum class Verb : int {
    kAllocate,     // a buffer at `place` of `size` bytes, registered on both comms
    kFree,         // deregisters and frees it
    kSend,         // `size` bytes at `at`, with content `seed`
    kReceive,      // and flushes; checks the whole buffer
    kFailCopy,     // the `at`-th copy from now
    kBeginKernel,  // on all GPUs
    kEndKernel,
    kReadWarnings,  // the answer's text, which are forgotten
  };
  Verb verb;
  Place place = {};
  std::size_t at = 0;
  std::size_t size = 0;
  std::uint64_t seed = 0;
};

struct Answer {
  nccl::Result result = nccl::Result::kSuccess;
  bool intact = true;            // kSend, kReceive: the bytes of the whole buffer
  unsigned long long start = 0;  // kAllocate: of the allocation
  unsigned long long waits = 0;  // kEndKernel: calls that have waited for a kernel
  char text[3000] = {};
};

class PeerProcess {
 public:
  explicit PeerProcess(int version, const std::vector<std::pair<std::string, std::string>>& environment = {})
      : process_("peer", version, environment) {}

  bool exchange_handles(conformance::Handle& own, conformance::Handle& others);
  // The test does its part of the operation between `ask` and `answer`.
  void ask(const Command& command);
  Answer answer();
  Answer call(const Command& command) {
    ask(command);
    return answer();
  }
  nccl::Result result() { return answer().result; }

 private:
  conformance::Process process_;
};

}  // namespace gpu_direct
