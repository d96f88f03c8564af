// Sends and receives through NCCL's table, polled like by NCCL's progress thread, but with a deadline.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "netapi/plugin.h"
#include "support/wait.h"

namespace conformance {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kDeadline = verbatim::test::kPatience;  // for events that must happen
constexpr auto kQuiet = 20ms;                          // the time in which an event must not happen

// One send, or one member of a receive.
struct Part {
  void* data;
  std::size_t size;  // for a receive: size of the buffer
  int tag;
  void* mhandle;
};

struct Operation {
  bool is_send = false;
  void* comm = nullptr;
  std::vector<Part> parts;
  std::uintptr_t preset = 0;  // value of *request before the call
  bool wants_sizes = true;    // false: test is called with a null pointer for the sizes
  void* request = nullptr;
  bool posted = false;
  bool done = false;
  int refusals = 0;        // number of calls that returned a null request
  std::vector<int> sizes;  // from test, one for each part
};

// Posts the operations of each comm in the order in which they were added. Each is retried until the plugin accepts it.
class Traffic {
 public:
  explicit Traffic(netapi::Plugin& plugin) : plugin_(plugin) {}

  // The references are valid as long as this object.
  Operation& send(void* comm, Part part);
  Operation& recv(void* comm, std::vector<Part> parts);

  // Polls until all operations are done. False: a call failed, or no operation was posted or done for so long, which is
  // a GoogleTest failure.
  bool run(Clock::duration limit = kDeadline);
  // Polls for this time. Operations may be left open.
  bool run_for(Clock::duration time);
  // One pass over all open operations.
  bool step();

  std::size_t open() const { return open_.size(); }
  // The number of operations that the plugin has accepted, including those that are done.
  std::size_t posted() const { return posted_; }

 private:
  bool post(Operation& operation);
  bool test(Operation& operation);

  netapi::Plugin& plugin_;
  std::vector<std::unique_ptr<Operation>> operations_;
  std::vector<Operation*> open_;  // operations that are not done, in the order of their addition
  std::size_t posted_ = 0;
  bool moved_ = false;  // an operation was posted or done in this pass
};

}  // namespace conformance
