// Ports with a rate: who sends when is decided by a virtual clock, and by nothing that differs from run to run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>

#include "qp_pair_fixture.h"
#include "support/verbs_fixture.h"
#include "support/verbs_peer.h"

namespace verbatim::test {
namespace {

constexpr std::uint64_t kQuantum = 16384;
constexpr std::uint64_t kGbps = 64;               // whole nanoseconds
constexpr std::size_t kBytes = 5 * kQuantum / 2;  // of each message: two quanta and a half
constexpr std::uint32_t kQps = 4;

struct TraceEntry {
  std::uint64_t ns;
  std::string port;
  std::uint32_t qpn;
  std::string to;
  std::uint32_t to_qpn;
  std::uint64_t bytes;
  std::uint64_t arrival_ns;
};

bool is_by_arrival() {
  const char* arbitration = std::getenv("SOFTVERBS_ARBITRATION");
  return arbitration != nullptr && std::string(arbitration) == "arrival";
}

void control(const char* subcommand) {
  ASSERT_EQ(std::system((std::string(std::getenv("SOFTVERBS_CONTROL")) + " " + subcommand).c_str()), 0) << subcommand;
}

std::vector<TraceEntry> read_trace() {
  std::ifstream file(std::getenv("SOFTVERBS_TRACE"));
  std::vector<TraceEntry> all;
  for (std::string line; std::getline(file, line);) {
    TraceEntry served{};
    unsigned long long ns = 0;
    unsigned long long bytes = 0;
    unsigned long long arrival = 0;
    char port[32];
    char to[32];
    const int fields = std::sscanf(
        line.c_str(),
        R"({"ns":%llu,"port":"%31[^"]","qpn":%u,"to":"%31[^"]","to_qpn":%u,"bytes":%llu,"arrival_ns":%llu})", &ns, port,
        &served.qpn, to, &served.to_qpn, &bytes, &arrival);
    EXPECT_EQ(fields, 7) << line;
    served.ns = ns;
    served.port = port;
    served.to = to;
    served.bytes = bytes;
    served.arrival_ns = arrival;
    all.push_back(served);
  }
  return all;
}

// As long as it lives nothing is sent, and the trace is whole.
class Hold {
 public:
  Hold() { control("hold"); }
  ~Hold() { control("release"); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
};

class RatedLink : public testing::Test {
 protected:
  // Both processes post one message on each QP while the clock is held: this one upwards by QP number, the other one
  // downwards. The trace of what is sent after the release.
  std::vector<TraceEntry> run() {
    std::optional<Hold> hold(std::in_place);
    const std::size_t before = read_trace().size();
    const Device device = open_device();
    const Region region(device.pd.get(), kBytes);
    Peer peer({.device = 1, .qps = kQps, .region_bytes = kBytes});
    std::vector<std::unique_ptr<Endpoint>> endpoints;
    for (std::uint32_t i = 0; i < kQps; ++i) {
      endpoints.push_back(std::make_unique<Endpoint>(device));
      endpoints[i]->connect(peer.address(i));
      peer.connect(endpoints[i]->address(), i);
    }
    for (std::uint32_t i = 0; i < kQps; ++i) {
      EXPECT_EQ(post(endpoints[i]->qp(), IBV_WR_RDMA_WRITE, {region.sge()}, peer.target(i)), 0);
      const std::uint32_t last = kQps - 1 - i;
      EXPECT_EQ(peer.post(IBV_WR_RDMA_WRITE, 0, kBytes,
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
    hold.emplace();  // a completion may be seen before its turn is over
    std::vector<TraceEntry> all = read_trace();
    all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(before));
    return all;
  }

  bool is_mine(const TraceEntry& one) const { return one.port == std::to_string(getpid()) + ".0"; }

  // What is the same in every run: relative times, and QPs by their place.
  std::string plain(const std::vector<TraceEntry>& served) const {
    std::string text;
    for (const TraceEntry& one : served) {
      text += std::to_string(one.ns - served.front().ns) + (is_mine(one) ? " here " : " there ") +
              std::to_string(one.qpn - (is_mine(one) ? first_qpn.first : first_qpn.second)) + " " +
              std::to_string(one.bytes) + " " + std::to_string(one.arrival_ns - served.front().ns) + "\n";
    }
    return text;
  }

  std::pair<std::uint32_t, std::uint32_t> first_qpn;
};

TEST_F(RatedLink, PostedWhileHeld_IsSent_InTheConfiguredOrder) {
  const std::vector<TraceEntry> all = run();
  for (const bool mine : {true, false}) {
    std::vector<TraceEntry> port;
    std::copy_if(all.begin(), all.end(), std::back_inserter(port),
                 [&](const TraceEntry& one) { return is_mine(one) == mine; });
    ASSERT_EQ(port.size(), 3 * kQps);
    std::uint64_t time = all.front().ns;
    for (std::uint32_t i = 0; i < port.size(); ++i) {
      SCOPED_TRACE(i);
      // By number: a quantum of each QP, then the next of each. By arrival: each message as a whole.
      const std::uint32_t turn = is_by_arrival() ? i / 3 : i % kQps;
      const std::uint32_t round = is_by_arrival() ? i % 3 : i / kQps;
      const std::uint32_t place = is_by_arrival() && !mine ? kQps - 1 - turn : turn;
      EXPECT_EQ(port[i].qpn, (mine ? first_qpn.first : first_qpn.second) + place);
      EXPECT_EQ(port[i].bytes, round == 2 ? kQuantum / 2 : kQuantum);
      EXPECT_EQ(port[i].ns, time) << "the port sends without a pause";
      EXPECT_EQ(port[i].arrival_ns, time + port[i].bytes * 8 / kGbps) << "nobody else sends there";
      EXPECT_NE(port[i].to, port[i].port);
      time += port[i].bytes * 8 / kGbps;
    }
  }
}

TEST_F(RatedLink, SentButIncompleteRequest_DoesNotAffectArbitration) {
  if (!is_by_arrival()) GTEST_SKIP() << "of service by arrival";
  const Device device = open_device();
  const Region source(device.pd.get(), kQuantum);
  const Region target(device.pd.get(), kQuantum);
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

// Steps end where a turn does: one whose answer was lost comes again in another turn.
TEST_F(RatedLink, StepWithoutResponse_IsRepeated) {
  constexpr std::size_t kMessage = 5 * kQuantum / 8;
  constexpr std::uint64_t kMessages = 50;
  Pair pair({.timeout = 8, .retry_count = 7}, kMessage);
  control("fault 'loss rate=0.1'");
  for (std::uint64_t i = 1; i <= kMessages; ++i) {
    EXPECT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {pair.source.sge()}, pair.to_target(i)), 0);
  }
  for (std::uint64_t i = 1; i <= kMessages; ++i) {
    const ibv_wc wc = poll_one(pair.a.send_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, i);
  }
  control("fault clear");
}

TEST_F(RatedLink, SameRun_GivesTheSameTrace) {
  const std::string first = plain(run());
  EXPECT_FALSE(first.empty());
  for (int again = 0; again < 3; ++again) EXPECT_EQ(plain(run()), first);
}

}  // namespace
}  // namespace verbatim::test
