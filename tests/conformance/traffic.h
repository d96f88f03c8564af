// Sends and receives through the C ABI, polled as NCCL's progress thread polls them, with a deadline instead of a hang.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "netapi/plugin.h"

namespace conformance {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kDeadline = 20s;  // for what must happen: far beyond what a busy machine needs
constexpr auto kQuiet = 20ms;    // for what must not happen

// One send, or one member of a receive.
struct Part {
  void* data;
  std::size_t size;  // of a receive: its capacity
  int tag;
  void* mhandle;
};

struct Operation {
  bool is_send = false;
  void* comm = nullptr;
  std::vector<Part> parts;
  std::uintptr_t preset = 0;  // what *request holds on entry
  bool wants_sizes = true;    // false: test is called with a null pointer for them
  void* request = nullptr;
  bool posted = false;
  bool done = false;
  int refusals = 0;        // how often it was answered by a null request
  std::vector<int> sizes;  // as test reported them, one for each part
};

// Operations on one comm are posted in the order in which they were added, each retried until the plugin takes it.
class Traffic {
 public:
  explicit Traffic(netapi::Plugin& plugin) : plugin_(plugin) {}

  // References stay valid for the life of this object.
  Operation& send(void* comm, Part part);
  Operation& recv(void* comm, std::vector<Part> parts);

  // Polls until all is done. Failures, a missed deadline among them, are reported to GoogleTest; then the answer is
  // false.
  bool run(Clock::duration limit = kDeadline);
  // Polls for a while; nothing need be done at the end.
  bool run_for(Clock::duration time);
  // One pass over what is open.
  bool step();

  std::size_t open() const { return open_.size(); }
  // How many the plugin has taken so far, the done ones included.
  std::size_t posted() const { return posted_; }

 private:
  bool post(Operation& operation);
  bool test(Operation& operation);

  netapi::Plugin& plugin_;
  std::vector<std::unique_ptr<Operation>> operations_;
  std::vector<Operation*> open_;  // not done yet, in the order of their addition
  std::size_t posted_ = 0;
  bool moved_ = false;  // something was posted or done in this pass
};

}  // namespace conformance
