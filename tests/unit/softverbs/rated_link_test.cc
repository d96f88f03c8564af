//: in softverbs_devices_test
//: test softverbs-link-{} filter=RatedLink.* use=control,device SOFTVERBS_LINK_GBPS=64
//:   + SOFTVERBS_TRACE={build}/tests/link-{variant}.trace
//:   qpn SOFTVERBS_ARBITRATION=qpn
//:   arrival SOFTVERBS_ARBITRATION=arrival
//:   adaptive-routing SOFTVERBS_ARBITRATION=arrival SOFTVERBS_ORDERING=adaptive-routing

// Ports with a rate: a virtual clock decides when each QP sends, so the trace is the same in every run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>

#include "link_trace.h"
#include "qp_pair_fixture.h"
#include "support/verbs_fixture.h"
#include "support/verbs_peer.h"

namespace verbatim::test {
namespace {

constexpr std::uint64_t kLinkQuantum = 16384;
constexpr std::uint64_t kGbps = 64;                       // gives whole nanoseconds
constexpr std::size_t kLinkBytes = 5 * kLinkQuantum / 2;  // size of each message: two and a half quanta
constexpr std::uint32_t kQps = 4;

bool is_by_arrival() {
  const char* arbitration = std::getenv("SOFTVERBS_ARBITRATION");
  return arbitration != nullptr && std::string(arbitration) == "arrival";
}

class RatedLink : public testing::Test {
 protected:
  // Both processes post one message on each QP while the clock is held: this process in ascending order of QP numbers,
  // the peer in descending order. Returns the trace of the messages that are sent after the release.
  std::vector<TraceEntry> run() {
    std::optional<Hold> hold(std::in_place);
    const std::size_t before = read_trace().size();
    const Device device = open_device();
    const Region region(device.pd.get(), kLinkBytes);
    Peer peer({.device = 1, .qps = kQps, .region_bytes = kLinkBytes});
    std::vector<std::unique_ptr<Endpoint>> endpoints;
    for (std::uint32_t i = 0; i < kQps; ++i) {
      endpoints.push_back(std::make_unique<Endpoint>(device));
      endpoints[i]->connect(peer.address(i));
      peer.connect(endpoints[i]->address(), i);
    }
    for (std::uint32_t i = 0; i < kQps; ++i) {
      EXPECT_EQ(post(endpoints[i]->qp(), IBV_WR_RDMA_WRITE, {region.sge()}, peer.target(i)), 0);
      const std::uint32_t last = kQps - 1 - i;
      EXPECT_EQ(peer.post(IBV_WR_RDMA_WRITE, 0, kLinkBytes,
                          {.wr_id = last, .remote_addr = region.address(), .rkey = region.mr->rkey}, last),
                0);
    }
    first_qpn = {endpoints[0]->qp()->qp_num, peer.address(0).qp_num};
    EXPECT_TRUE(stays_empty(endpoints[0]->send_cq(), 20ms));
    EXPECT_EQ(read_trace().size(), before) << "something was sent while the clock was held";
    hold.reset();
    for (std::uint32_t i = 0; i < kQps; ++i) {
      EXPECT_EQ(poll_one(endpoints[i]->send_cq()).status, IBV_WC_SUCCESS);
      EXPECT_EQ(peer.poll_sent(i).status, IBV_WC_SUCCESS);
    }
    hold.emplace();  // a completion can be polled before its quantum ends and is in the trace
    std::vector<TraceEntry> all = read_trace();
    all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(before));
    return all;
  }

  bool is_local(const TraceEntry& sent) const { return sent.port == std::to_string(getpid()) + ".0"; }

  // The trace with the values that are the same in every run: times and QP numbers relative to the first ones.
  std::string normalized(const std::vector<TraceEntry>& entries) const {
    std::string text;
    for (const TraceEntry& sent : entries) {
      text += std::to_string(sent.ns - entries.front().ns) + (is_local(sent) ? " local " : " remote ") +
              std::to_string(sent.qpn - (is_local(sent) ? first_qpn.first : first_qpn.second)) + " " +
              std::to_string(sent.bytes) + " " + std::to_string(sent.arrival_ns - entries.front().ns) + "\n";
    }
    return text;
  }

  std::pair<std::uint32_t, std::uint32_t> first_qpn;
};

TEST_F(RatedLink, PostedWhileHeld_IsSent_InTheConfiguredOrder) {
  const std::vector<TraceEntry> all = run();
  for (const bool local : {true, false}) {
    std::vector<TraceEntry> port;
    std::copy_if(all.begin(), all.end(), std::back_inserter(port),
                 [&](const TraceEntry& sent) { return is_local(sent) == local; });
    ASSERT_EQ(port.size(), 3 * kQps);
    std::uint64_t time = all.front().ns;
    for (std::uint32_t i = 0; i < port.size(); ++i) {
      SCOPED_TRACE(i);
      // By QP number: one quantum of each QP, then the next quantum of each. By arrival: each message as a whole.
      const std::uint32_t index = is_by_arrival() ? i / 3 : i % kQps;
      const std::uint32_t round = is_by_arrival() ? i % 3 : i / kQps;
      const std::uint32_t position = is_by_arrival() && !local ? kQps - 1 - index : index;
      EXPECT_EQ(port[i].qpn, (local ? first_qpn.first : first_qpn.second) + position);
      EXPECT_EQ(port[i].bytes, round == 2 ? kLinkQuantum / 2 : kLinkQuantum);
      EXPECT_EQ(port[i].ns, time) << "the port sends without a pause";
      EXPECT_EQ(port[i].arrival_ns, time + port[i].bytes * 8 / kGbps) << "no other port sends to this one";
      EXPECT_NE(port[i].to, port[i].port);
      time += port[i].bytes * 8 / kGbps;
    }
  }
}

TEST_F(RatedLink, SentButIncompleteRequest_DoesNotAffectArbitration) {
  if (!is_by_arrival()) GTEST_SKIP() << "needs SOFTVERBS_ARBITRATION=arrival";
  const Device device = open_device();
  const Region source(device.pd.get(), kLinkQuantum);
  const Region target(device.pd.get(), kLinkQuantum);
  Endpoint senders[]{Endpoint(device), Endpoint(device)};
  Endpoint receivers[]{Endpoint(device), Endpoint(device)};
  for (std::uint32_t i = 0; i < 2; ++i) connect(senders[i], receivers[i]);
  std::optional<Hold> hold(std::in_place);
  const std::size_t before = read_trace().size();
  for (std::uint32_t i = 0; i < 8; ++i) {
    const SendOptions options{.remote_addr = target.address(), .rkey = target.mr->rkey};
    EXPECT_EQ(post(senders[i % 2].qp(), IBV_WR_RDMA_WRITE, {source.sge()}, options), 0);
  }
  hold.reset();
  for (std::uint32_t i = 0; i < 8; ++i) EXPECT_EQ(poll_one(senders[i % 2].send_cq()).status, IBV_WC_SUCCESS);
  hold.emplace();
  const std::vector<TraceEntry> all = read_trace();
  ASSERT_EQ(all.size(), before + 8);
  for (std::uint32_t i = 0; i < 8; ++i) EXPECT_EQ(all[before + i].qpn, senders[i % 2].qp()->qp_num) << i;
}

// A step ends with its quantum. A step whose response was lost is sent again in a later quantum.
TEST_F(RatedLink, StepWithoutResponse_IsRepeated) {
  constexpr std::size_t kMessage = 5 * kLinkQuantum / 8;
  constexpr std::uint64_t kMessages = 50;
  Pair pair({.timeout = 8, .retry_count = 7}, kMessage);
  run_control("fault 'loss rate=0.1'");
  for (std::uint64_t i = 1; i <= kMessages; ++i) {
    EXPECT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge()}, pair.to_target(i)), 0);
  }
  for (std::uint64_t i = 1; i <= kMessages; ++i) {
    const ibv_wc wc = poll_one(pair.a.send_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, i);
  }
  run_control("fault clear");
}

TEST_F(RatedLink, SameRun_GivesTheSameTrace) {
  const std::string first = normalized(run());
  EXPECT_FALSE(first.empty());
  for (int again = 0; again < 3; ++again) EXPECT_EQ(normalized(run()), first);
}

}  // namespace
}  // namespace verbatim::test
