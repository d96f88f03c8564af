//: program unit_net_failover sources=support/child.cc link=net,verbs_headers,gtest
// A lane fails at every tenth of its messages (-all: at every one), with requests, acknowledgements or CTS entries
// that vanish and with events; several QPs a lane; up to three of four lanes, also while messages of another are
// posted again; different numbers of ports at both ends; groups, striped, short and empty messages, optional
// completion, flushes. Lanes come back after events, with another GID, within a half-filled group, with links that
// flap. Every byte is checked. Three changes to the code that it finds: everything counts as arrived; one immediate
// less; the CTS ring is not written again. Halves, because their cases wait for time-outs one after the other. With a
// sanitizer fewer points, because each takes four times as long there.
//: test unit-net-failover shards=2 priority=8 timeout=180
//:   when sanitizer=any FAILOVER_EVERY=60 FAILOVER_FLAPS=5
//: test unit-net-failover-all full timeout=900 FAILOVER_EVERY=1 FAILOVER_FLAPS=1000
// With ThreadSanitizer some cases whose threads do much at once.
//: test unit-net-failover-threads sanitizer=thread suite=threads
//:   + filter=Failover.EngineThreads*:Failover.IdleReceiver_*:LaneReturns.LinkComesBack*
//:   + filter=OneLane.Flushed*First*:OneLane.IdleReceiver*
// Lanes that fail on devices as those of these drivers. Two raise an event of the QP beside the completion with used up
// retries; mlx5 raises none, so it runs only with tools/check --full.
//: test unit-net-failover-{} timeout=180 SOFTVERBS_PROFILE={variant} FAILOVER_EVERY=60
//:   + filter=Failover.AcknowledgementsVanish*:Failover.CtsEntriesVanish*:Failover.ArrivalWords_*:OneLane.Outage_*
//:   + filter=OneLane.IdleReceiverAndLinkDown*:OneLane.OutageBehind*:OneLane.Flushed*:OneLane.OutageIsTooLong*
//:   mlx5 full
//:   bnxt_re
//:   irdma
//: test unit-net-failover-more-{driver} driver=mlx5,bnxt_re,irdma full timeout=300 SOFTVERBS_PROFILE={driver}
//:   + filter=LaneReturns.LinkComesBack*:LaneReturns.OtherShapes*:LaneReturns.GroupHalfFilled*:LaneReturns.Flush*
//:   + filter=Failover.PortEvent_Every*:Failover.SeveralQps*:Failover.GroupHalfFilled*:Failover.Flush*
//:   + filter=Failover.OtherLanes*:Failover.Idle*:OneLane.Idle*:OneLane.Several* FAILOVER_EVERY=10
//:   when sanitizer=any FAILOVER_EVERY=60

// Lanes that fail: every byte arrives, once to the application, over the others.
#include "failover_traffic.h"

namespace verbatim {
namespace {

constexpr int kMessages = 36;  // on each of two lanes in three rounds: the fault begins with each of them

std::size_t count_lane_lines(const std::string& output) {
  const Lines lines = warnings_of(output);
  return static_cast<std::size_t>(std::count_if(lines.begin(), lines.end(), [](const std::string& line) {
    return line.starts_with("lane ") && line.find(" is down, the connection goes on over ") != std::string::npos;
  }));
}

// `failing`: lanes that fail, of which each end logs a line.
void survives(
    const std::string& faults, const test::Variables& more = {}, std::size_t failing = 1,
    const std::function<void()>& body = [] { Traffic().rounds(3); }) {
  SCOPED_TRACE(faults);
  EXPECT_EQ(count_lane_lines(in_child(faults, body, more)), 2 * failing);
}

TEST(Failover, RequestsVanish_EveryByteArrives) {
  for (int nth = 1; nth < kMessages; nth += step()) survives(from_message("drop-request device=1", nth));
}

TEST(Failover, AcknowledgementsVanish_EveryByteArrivesOnce) {
  for (int nth = 2; nth < kMessages; nth += step()) survives(from_message("drop-ack device=1", nth));
}

// A message is a WRITE and an atomic here, so there are more points.
TEST(Failover, ArrivalWords_EveryByteArrivesOnce) {
  for (int nth = 3; nth < kMessages + 9; nth += wide_step()) {
    survives(from_message("drop-request device=1", nth), kAtomics);
    survives(from_message("drop-ack device=0", nth), kAtomics);
  }
}

TEST(Failover, ArrivalWordsOfSeveralQpsALane_EveryByteArrivesOnce) {
  test::Variables several = kAtomics;
  several.emplace_back("VERBATIM_QPS_PER_CONNECTION", "3");
  for (int nth = 4; nth < kMessages; nth += wide_step()) {
    survives(from_message("drop-ack device=1", nth), several);
    survives(from_message("drop-request device=0", nth), several);
  }
}

// The arrival words begin again while atomics of a lane that fails a little later may still come.
TEST(Failover, ArrivalWordsAndSeveralLanesFail_EveryByteArrivesOnce) {
  test::Variables atomics = kFourDevices;
  atomics.insert(atomics.end(), kAtomics.begin(), kAtomics.end());
  for (int nth = 8; nth < kMessages / 2; nth += step()) {
    survives(from_message("drop-request device=1", 8) + ";" + from_message("drop-ack device=0", nth) + ";" +
                 from_message("drop-request device=3", nth + 5),
             atomics, 3, [] { Traffic(4).rounds(3); });
  }
}

// The first lane carries the CTS entries.
TEST(Failover, CtsEntriesVanish_TheyGoOverAnotherLane) {
  for (int nth = 1; nth < kMessages; nth += step()) survives(from_message("drop-request device=0", nth));
  for (int nth = 3; nth < kMessages; nth += step()) survives(from_message("drop-ack device=0", nth));
}

TEST(Failover, PortEvent_EveryByteArrives) {
  for (int nth = 1; nth < kMessages; nth += step()) survives("link-down device=1 after=" + std::to_string(nth));
}

// Nothing waits for the retries, which take more than two minutes here: neither the messages, nor a flush, nor a
// connection that is made while the link is down.
TEST(Failover, PortEvent_NothingWaitsForRetries) {
  in_child("link-down device=1 after=12",
           [] {
             std::vector<std::uint8_t> buffer(64);
             Traffic traffic;
             const std::unique_ptr<MemoryHandle> memory =
                 traffic.link.reg(traffic.link.recv(), buffer, MemoryType::kCuda);
             Request* flush = traffic.link.recv().iflush(buffer.data(), *memory);
             const auto done = [&] {
               int is_done = 0;
               RecvComm::test_flush(*flush, &is_done);
               return is_done == 1;
             };
             ASSERT_TRUE(ConnectedComms::eventually(done));
             traffic.rounds(3);
             flush = traffic.link.recv().iflush(buffer.data(), *memory);
             EXPECT_TRUE(ConnectedComms::eventually(done));
             Traffic later;
             later.rounds(2);
           },
           {{"VERBATIM_TIMEOUT", "22"}, {"VERBATIM_RETRY_CNT", "7"}});
}

// What the NIC of a lane has accepted may come into memory late: until then nothing is posted again, and no flush of
// GPU memory is done.
TEST(Failover, ReceiverWaitsForLateBytes) {
  for (const auto& [flushes, more] : {std::pair{false, test::Variables{}}, {true, {}}, {true, kAtomics}}) {
    SCOPED_TRACE(flushes);
    survives("link-down device=1 after=20", more, 1, [flushes = flushes] {
      using Clock = std::chrono::steady_clock;
      constexpr std::chrono::milliseconds kLate(10);
      std::vector<std::uint8_t> buffer(64);
      Traffic traffic;
      ConnectedComms& link = traffic.link;
      const MemoryType type = flushes ? MemoryType::kCuda : MemoryType::kHost;
      const std::unique_ptr<MemoryHandle> memory = link.reg(link.recv(), buffer, type);
      Clock::time_point working;  // the last time that the receiver used both lanes
      EXPECT_TRUE(traffic.is_reached([&] {
        const Clock::time_point now = Clock::now();  // before the look, after which this thread may pause
        if (link.recv().lanes_down() == 0) working = now;
        return link.recv().lanes_down() == 1;
      }));
      if (flushes) {  // while the sender makes no call
        Request* const flush = link.recv().iflush(buffer.data(), *memory);
        ASSERT_NE(flush, nullptr);
        EXPECT_TRUE(ConnectedComms::eventually([&] {
          int done = 0;
          RecvComm::test_flush(*flush, &done);
          return done == 1;
        }));
        EXPECT_GE(Clock::now() - working, kLate);
      }
      EXPECT_TRUE(traffic.is_reached([&] { return link.send().lanes_down() == 1 && !link.send().lanes_change(); }));
      EXPECT_GE(Clock::now() - working, kLate);
    });
  }
}

TEST(Failover, SeveralQpsALane_EveryByteArrives) {
  const test::Variables qps = {{"VERBATIM_QPS_PER_CONNECTION", "3"}};
  for (int nth = 1; nth < kMessages / 2; nth += step()) {
    survives(from_message("drop-request device=1", nth), qps);
    survives(from_message("drop-ack device=0", nth), qps);
  }
}

// The second lane fails while what the first one has lost is posted again, or later.
TEST(Failover, OtherLanesFailToo_TheLastOneCarriesAll) {
  for (int nth = 8; nth < kMessages / 2; nth += step()) {
    survives(from_message("drop-request device=1", 8) + ";" + from_message("drop-ack device=0", nth) + ";" +
                 from_message("drop-request device=3", nth + 5),
             kFourDevices, 3, [] { Traffic(4).rounds(3); });
  }
}

// A port that several lanes use, and one that only one end has.
TEST(Failover, DifferentNumbersOfPorts_EveryByteArrives) {
  for (const auto& [from, to] : {std::pair{1, 2}, std::pair{2, 1}, std::pair{2, 4}, std::pair{4, 2}}) {
    for (int nth = 4; nth < 20; nth += 5) {
      for (const char* kind : {"drop-request", "drop-ack"}) {
        // The last port of the end that has more has one lane. Requests of the other end arrive there too.
        const std::string clause = std::string(kind) + " device=" + std::to_string(std::max(from, to) - 1);
        SCOPED_TRACE(std::to_string(from) + " to " + std::to_string(to) + ": " + clause);
        in_child(
            from_message(clause, nth), [from = from, to = to] { Traffic(from, to).rounds(3); }, kFourDevices);
      }
    }
  }
}

// Its first member has been accepted when the lane fails whose turn it is, and other messages are posted again.
TEST(Failover, GroupHalfFilled_KeepsItsBytes) {
  for (const char* device : {"0", "1"}) {
    survives(std::string("drop-request op=write_imm count=all times=all device=") + device, {}, 1, [] {
      Traffic traffic;
      constexpr std::size_t kMember = 5000;
      Buffers<> group(traffic.link, pattern(2 * kMember, 7));
      std::vector<std::unique_ptr<Buffers<>>> single;
      std::vector<Request*> requests;
      for (std::size_t i = 0; i < 3; ++i) {
        single.push_back(std::make_unique<Buffers<>>(traffic.link, pattern(kMember, i)));
        requests.push_back(traffic.link.posted([&] { return single[i]->irecv(kMember); }));
      }
      const RecvBuffer members[] = {{group.target.data(), kMember, 0, group.recv_memory.get()},
                                    {group.target.data() + kMember, kMember, 1, group.recv_memory.get()}};
      requests.push_back(traffic.link.posted([&] { return traffic.link.irecv(members); }));
      for (std::size_t i = 0; i < 3; ++i) {
        requests.push_back(traffic.link.posted([&] { return single[i]->isend(kMember); }));
      }
      const MemoryKeys& memory = *group.send_memory;
      requests.push_back(
          traffic.link.posted([&] { return traffic.link.isend(group.source.data(), kMember, 0, memory); }));
      EXPECT_TRUE(ConnectedComms::eventually([&] {
        traffic.link.progress();
        return traffic.link.send().lanes_down() == 1 && (traffic.link.send().slow_path_flags() & Comm::kLanes) == 0;
      }));
      requests.push_back(
          traffic.link.posted([&] { return traffic.link.isend(group.source.data() + kMember, kMember, 1, memory); }));
      for (Request* const request : requests) ASSERT_TRUE(traffic.link.wait(request));
      EXPECT_EQ(group.target, group.source) << "wrong bytes";
      for (const auto& one : single) EXPECT_EQ(one->target, one->source) << "wrong bytes";
    });
  }
}

// Its application makes no call until data arrives: receives with optional completion are done at once.
void send_to_idle_receiver(Traffic& traffic) {
  std::vector<std::unique_ptr<Buffers<>>> buffers;
  for (std::size_t i = 0; i < 8; ++i) {
    buffers.push_back(std::make_unique<Buffers<>>(traffic.link, pattern(300, i)));
    ASSERT_NE(traffic.link.posted([&] { return buffers.back()->irecv(300, 0, true); }), nullptr);
  }
  for (const auto& one : buffers) {
    Request* request = nullptr;
    EXPECT_TRUE(ConnectedComms::eventually([&] { return (request = one->isend(300)) != nullptr; }));
    ASSERT_NE(request, nullptr);
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      traffic.link.send().progress();
      return request->state == RequestState::kDone;
    }));
    EXPECT_TRUE(one->has_come()) << "wrong bytes";
  }
  traffic.rounds(1);
}

TEST(Failover, IdleReceiver_LostCtsEntriesAreWrittenAgain) {
  survives("link-down device=0 after=5", {{"VERBATIM_TIMEOUT", "20"}}, 1, [] {
    Traffic traffic;
    send_to_idle_receiver(traffic);
  });
}

// No event comes, and the sender has nothing to send that would not be acknowledged. The receiver's CTS entries alone
// leave its first device; with short retries its QP fails, which an application that makes no calls does not see.
TEST(Failover, IdleReceiverAndNoEvent_LostCtsEntriesAreWrittenAgain) {
  for (const char* timeout : {"8", "20"}) {
    test::Variables variables = kFourDevices;
    variables.emplace_back("VERBATIM_TIMEOUT", timeout);
    variables.emplace_back("VERBATIM_LANE_TIMEOUT_MS", "200");
    survives(from_message("drop-request device=0", 9), variables, 1, [] {
      Traffic traffic(2, 2, 2);
      traffic.rounds(1);
      send_to_idle_receiver(traffic);
    });
  }
}

TEST(Failover, EngineThreads_EveryByteArrives) {
  const test::Variables threads = {{"SOFTVERBS_ENGINE", "thread"}};
  for (int nth = 5; nth < kMessages; nth += 13) {
    survives(from_message("drop-request device=0", nth), threads);
    survives(from_message("drop-ack device=1", nth), threads);
  }
  test::Variables atomics = kAtomics;
  atomics.insert(atomics.end(), threads.begin(), threads.end());
  for (int nth = 9; nth < kMessages; nth += 20) survives(from_message("drop-ack device=1", nth), atomics);
}

TEST(Failover, LaneFails_OneLineNamesBothPortsAndWhatIsLeft) {
  const Lines lines = warnings_of(in_child(from_message("drop-request device=1", 20), [] { Traffic().rounds(3); }));
  for (const std::string& line : lines) {
    EXPECT_TRUE(line.starts_with("lane 2 of 2 is down, the connection goes on over 1 with 50 % of the bandwidth: "))
        << line;
    EXPECT_NE(line.find("Path: HOST softverbs1:1 "), std::string::npos) << line;
    EXPECT_NE(line.find(" to HOST softverbs1:1 "), std::string::npos) << line;
  }
  EXPECT_EQ(lines.size(), 2U);  // one at each end
}

TEST(Failover, LaneFails_StatisticsSaySo) {
  in_child(from_message("drop-request device=1", 20), [] {
    Traffic traffic;
    EXPECT_EQ(traffic.link.send().stats().lanes, 2U);
    EXPECT_EQ(traffic.link.send().stats().lanes_down, 0U);
    traffic.rounds(3);
    EXPECT_EQ(traffic.link.send().stats().lanes_down, 1U);
    EXPECT_EQ(traffic.link.recv().stats().lanes_down, 1U);
    for (const ConnectionStats& stats : {traffic.link.send().stats(), traffic.link.recv().stats()}) {
      ASSERT_EQ(stats.outages.size(), 1U);
      EXPECT_EQ(stats.outages[0].lane, 1U);
      EXPECT_EQ(stats.outages[0].end_ns, 0U);
    }
  });
}

// The READs of a flush go over every port of the receiver.
TEST(Failover, Flush_EndsWithoutThePortThatIsDown) {
  for (const char* fault : {"drop-request op=read device=1 count=all times=all", "link-down device=1 after=3"}) {
    SCOPED_TRACE(fault);
    in_child(fault, [] {
      Traffic traffic;
      std::vector<std::uint8_t> buffer(64);
      const std::unique_ptr<MemoryHandle> memory = traffic.link.reg(traffic.link.recv(), buffer, MemoryType::kCuda);
      for (int i = 0; i < 3; ++i) {
        Request* const flush = traffic.link.recv().iflush(buffer.data(), *memory);
        ASSERT_NE(flush, nullptr);
        EXPECT_TRUE(ConnectedComms::eventually([&] {
          int done = 0;
          RecvComm::test_flush(*flush, &done);
          return done == 1;
        }));
        traffic.rounds(1);
      }
    });
  }
}

TEST(Failover, LastLaneFails_BothEndsFail) {
  const auto body = [] {
    Traffic traffic;
    EXPECT_TRUE(traffic.fails());
    EXPECT_TRUE(ConnectedComms::fails(traffic.link.send()));
    EXPECT_TRUE(ConnectedComms::fails(traffic.link.recv()));
  };
  in_child(from_message("drop-request device=1", 8) + ";" + from_message("drop-request device=0", 20), body,
           {{"VERBATIM_RECONNECT_S", "0"}});
}

}  // namespace
}  // namespace verbatim
