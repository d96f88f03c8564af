// Sends the messages of a plan over one connection. Both ends are in this process and on this thread.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "netapi/plugin.h"
#include "plan.h"

namespace verbatim::completion {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws a Failure with the name of `call` when `result` is an error.
void require(nccl::Result result, const char* call);

struct Totals {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;  // sent bytes
  std::uint64_t received_bytes =
      0;  // without receives with optional completion, whose sizes the receiver does not know
  std::uint64_t optional = 0;
  std::array<std::uint64_t, 8> groups{};  // [n - 1]: number of receives with n members
  std::uint64_t wrong_bytes = 0;          // number of messages with wrong bytes
  std::uint64_t wrong_sizes = 0;          // number of wrong sizes from test
};

class Traffic {
 public:
  Traffic(netapi::Plugin& plugin, void* send_comm, void* recv_comm, const PlanOptions& options, Totals& totals);
  ~Traffic();
  Traffic(const Traffic&) = delete;
  Traffic& operator=(const Traffic&) = delete;

  // Returns when all messages are done. Throws a Failure when a call fails or there is no progress.
  void run();

 private:
  // Number of outstanding groups; NCCL has at most 32 requests.
  static constexpr std::size_t kWindow = 16;

  struct GroupInFlight {
    Group group;
    std::vector<std::byte*> sources;  // one for each member
    std::vector<std::byte*> targets;
    void* receive = nullptr;
    bool posted = false;
    bool received = false;     // the receive is done
    bool verified = false;     // the bytes were checked
    std::vector<void*> sends;  // in the order of send_order; null: done
    std::size_t sends_open = 0;
  };

  GroupInFlight& flight(std::uint64_t index) { return flights_[index % kWindow]; }
  void begin();
  bool post();
  bool send();
  void test(GroupInFlight& at);
  void test_receive(GroupInFlight& at);
  void test_sends(GroupInFlight& at);
  void verify_group(GroupInFlight& at);
  bool is_intact(const GroupInFlight& at, std::size_t member) const;

  netapi::Plugin& plugin_;
  void* const send_comm_;
  void* const recv_comm_;
  Plan plan_;
  Totals& totals_;
  std::vector<std::byte> source_;
  std::vector<std::byte> target_;
  void* source_handle_ = nullptr;
  void* target_handle_ = nullptr;
  std::array<GroupInFlight, kWindow> flights_;
  std::uint64_t oldest_ = 0;  // groups before oldest_ are done; groups from oldest_ to begun_ - 1 are in flights_
  std::uint64_t begun_ = 0;
  std::uint64_t posted_ = 0;
  std::uint64_t sent_ = 0;
  bool moved_ = false;
};

}  // namespace verbatim::completion
