//: in softverbs_devices_test
//: test softverbs-port-rates filter=PortRates.* use=control,device SOFTVERBS_LINK_GBPS=100,25 SOFTVERBS_QUANTUM=102400
//:   + SOFTVERBS_TRACE={build}/tests/port-rates.trace

// Ports with different rates: each sends and receives at its own. Device 0 has 100 Gbit/s, device 1 has 25 Gbit/s.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>

#include "link_trace.h"
#include "support/verbs_fixture.h"
#include "support/verbs_peer.h"

namespace verbatim::test {
namespace {

constexpr std::uint64_t kQuantum = 102400;
constexpr std::uint64_t kFastNs = kQuantum * 8 / 100;  // whole nanoseconds
constexpr std::uint64_t kSlowNs = kQuantum * 8 / 25;
constexpr std::uint64_t kQuanta = 4;  // of each message

struct Message {
  const Endpoint& from;
  const Region& source;
  SendOptions target;
};

// Sends the messages from the same virtual time on, and returns their part of the trace.
std::vector<TraceEntry> send_together(const std::vector<Message>& messages) {
  std::optional<Hold> hold(std::in_place);
  const std::size_t before = read_trace().size();
  for (const Message& message : messages) {
    EXPECT_EQ(post(message.from.qp(), IBV_WR_RDMA_WRITE, {message.source.sge()}, message.target), 0);
  }
  hold.reset();
  for (const Message& message : messages) EXPECT_EQ(poll_one(message.from.send_cq()).status, IBV_WC_SUCCESS);
  hold.emplace();  // a completion can be polled before its quantum ends and is in the trace
  std::vector<TraceEntry> all = read_trace();
  all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(before));
  return all;
}

std::vector<TraceEntry> sent_by(const std::vector<TraceEntry>& all, std::uint32_t device) {
  std::vector<TraceEntry> result;
  const std::string port = std::to_string(getpid()) + "." + std::to_string(device);
  std::copy_if(all.begin(), all.end(), std::back_inserter(result),
               [&](const TraceEntry& entry) { return entry.port == port; });
  return result;
}

class PortRates : public testing::Test {
 protected:
  const Device fast = open_device(0);
  const Device slow = open_device(1);
  const Region fast_memory{fast.pd.get(), kQuanta* kQuantum};
  const Region slow_memory{slow.pd.get(), kQuanta* kQuantum};

  static SendOptions write_to(const Region& region) {
    return {.remote_addr = region.address(), .rkey = region.mr->rkey};
  }
};

TEST_F(PortRates, EachPort_SendsAtItsOwnRate) {
  Endpoint fast_ends[]{Endpoint(fast), Endpoint(fast)};
  Endpoint slow_ends[]{Endpoint(slow), Endpoint(slow)};
  connect(fast_ends[0], fast_ends[1]);
  connect(slow_ends[0], slow_ends[1]);
  const std::vector<TraceEntry> all = send_together(
      {{fast_ends[0], fast_memory, write_to(fast_memory)}, {slow_ends[0], slow_memory, write_to(slow_memory)}});
  for (const std::uint32_t device : {0U, 1U}) {
    SCOPED_TRACE(device);
    const std::uint64_t duration = device == 0 ? kFastNs : kSlowNs;
    const std::vector<TraceEntry> sent = sent_by(all, device);
    ASSERT_EQ(sent.size(), kQuanta);
    for (std::uint64_t i = 0; i < kQuanta; ++i) {
      EXPECT_EQ(sent[i].ns, all.front().ns + i * duration);
      EXPECT_EQ(sent[i].bytes, kQuantum);
      EXPECT_EQ(sent[i].arrival_ns, sent[i].ns + duration);
    }
  }
}

TEST_F(PortRates, SlowerReceiver_ReceivesLater) {
  Endpoint sender(fast);
  Endpoint receiver(slow);
  connect(sender, receiver);
  const std::vector<TraceEntry> all = send_together({{sender, fast_memory, write_to(slow_memory)}});
  ASSERT_EQ(all.size(), kQuanta);
  for (std::uint64_t i = 0; i < kQuanta; ++i) {
    EXPECT_EQ(all[i].ns, all.front().ns + i * kFastNs);
    EXPECT_EQ(all[i].arrival_ns, all.front().ns + (i + 1) * kSlowNs);
  }
}

TEST_F(PortRates, SlowerSender_DoesNotOccupyTheReceiver) {
  Endpoint slow_sender(slow);
  Endpoint fast_sender(fast);
  Endpoint receivers[]{Endpoint(fast), Endpoint(fast)};
  connect(slow_sender, receivers[0]);
  connect(fast_sender, receivers[1]);
  const std::vector<TraceEntry> alone = send_together({{slow_sender, slow_memory, write_to(fast_memory)}});
  ASSERT_EQ(alone.size(), kQuanta);
  for (std::uint64_t i = 0; i < kQuanta; ++i) EXPECT_EQ(alone[i].arrival_ns, alone.front().ns + (i + 1) * kSlowNs);

  // 125 Gbit/s for a port of 100 Gbit/s: while both send, each quantum of the slow port delays one of the fast port.
  const std::vector<TraceEntry> both = send_together(
      {{slow_sender, slow_memory, write_to(fast_memory)}, {fast_sender, fast_memory, write_to(fast_memory)}});
  const std::vector<TraceEntry> of_fast = sent_by(both, 0);
  ASSERT_EQ(of_fast.size(), kQuanta);
  const std::uint64_t start = both.front().ns;
  EXPECT_EQ(of_fast.front().ns, start);
  EXPECT_EQ(of_fast.front().arrival_ns, start + kFastNs);
  for (std::uint64_t i = 1; i < kQuanta; ++i) EXPECT_EQ(of_fast[i].arrival_ns, start + (i + 2) * kFastNs);
  for (const TraceEntry& entry : sent_by(both, 1)) EXPECT_EQ(entry.arrival_ns, entry.ns + kSlowNs);
}

// The rate of a port of another process is that of the device there.
TEST_F(PortRates, ReceiverInAnotherProcess_ReceivesAtItsRate) {
  Peer peer({.device = 1, .region_bytes = kQuanta * kQuantum});
  Endpoint sender(fast);
  sender.connect(peer.address());
  peer.connect(sender.address());
  const std::vector<TraceEntry> all = send_together({{sender, fast_memory, peer.target(1)}});
  ASSERT_EQ(all.size(), kQuanta);
  for (std::uint64_t i = 0; i < kQuanta; ++i) EXPECT_EQ(all[i].arrival_ns, all.front().ns + (i + 1) * kSlowNs);
}

}  // namespace
}  // namespace verbatim::test
