//: in unit_net_failover

// Lanes that come back after they were down, and connections of one lane that wait for it.
#include "failover_traffic.h"
#include "side_channels.h"
#include "support/refusal.h"
#include "verbs/qp.h"

namespace verbatim {
namespace {

std::size_t count_lines(const std::string& output, const std::string& begin, const std::string& part) {
  const Lines lines = warnings_of(output);
  return static_cast<std::size_t>(std::ranges::count_if(
      lines, [&](const std::string& line) { return line.starts_with(begin) && line.find(part) != std::string::npos; }));
}

std::size_t outages(Traffic& traffic) {
  return traffic.link.send().stats().outages.size() + traffic.link.recv().stats().outages.size();
}

// Rounds until both ends use all of their lanes, after more outages than `before`: one may end within a round.
void rounds_until_all_work(Traffic& traffic, std::size_t before = 0) {
  const auto down = [&] { return traffic.link.send().lanes_down() + traffic.link.recv().lanes_down(); };
  EXPECT_TRUE(ConnectedComms::eventually([&] {
    traffic.rounds(1);
    return ::testing::Test::HasFailure() || outages(traffic) > before;
  }));
  EXPECT_TRUE(ConnectedComms::eventually([&] {
    traffic.rounds(1);
    return ::testing::Test::HasFailure() || down() == 0;
  }));
  traffic.rounds(3);
}

// Messages over a third device. The first QP of the process has sent as many as send() was called, and one before, so
// a fault with `qp=1 after=N` begins at the N-th call, however slow the machine is.
class Trigger {
 public:
  Trigger() {
    link_.connect(2, 2);
    buffers_ = std::make_unique<Buffers<>>(link_, 1);
    send();
  }
  void send() {
    Request* const receive = link_.posted([&] { return buffers_->irecv(1); });
    Request* const send = link_.posted([&] { return buffers_->isend(1); });
    for (Request* const request : {receive, send}) {
      ASSERT_TRUE(link_.wait(request));
      link_.is_completed(request);
    }
  }

 private:
  ConnectedComms link_;
  std::unique_ptr<Buffers<>> buffers_;
};

TEST(LaneReturns, LinkComesBack_IsUsedAgain) {
  for (const char* engine : {"inline", "thread"}) {
    for (const char* device : {"0", "1"}) {
      SCOPED_TRACE(std::string(engine) + " " + device);
      const std::string output =
          in_child(std::string("link-down after=12 for=200ms device=") + device,
                   [] {
                     Traffic traffic;
                     rounds_until_all_work(traffic);
                     for (const ConnectionStats& stats : {traffic.link.send().stats(), traffic.link.recv().stats()}) {
                       ASSERT_EQ(stats.outages.size(), 1U);
                       EXPECT_GT(stats.outages[0].end_ns, stats.outages[0].begin_ns);
                     }
                   },
                   {{"SOFTVERBS_ENGINE", engine}, {"VERBATIM_TIMEOUT", "14"}, {"VERBATIM_RETRY_CNT", "7"}});
      EXPECT_EQ(count_lines(output, "lane ", " is down, the connection goes on over 1 with 50 % of the bandwidth: "),
                2U);
      EXPECT_EQ(count_lines(output, "lane ", " is back after "), 2U);
      EXPECT_EQ(count_lines(output, "lane ", ", the connection uses 2 with 100 % of the bandwidth. Path: "), 2U);
    }
  }
}

// The addresses of the interface are at other indices when the link is back, also than at the one that a setting names.
TEST(LaneReturns, AddressesMove_LaneIsUsedAgain) {
  const std::string output = in_child("link-down after=12 for=100ms device=1",
                                      [] {
                                        Traffic traffic;
                                        rounds_until_all_work(traffic);
                                      },
                                      {{"SOFTVERBS_GID_TABLE", "renumbered"}, {"VERBATIM_GID_INDEX", "3"}});
  EXPECT_EQ(count_lines(output, "lane ", " is back after "), 2U);
}

// Several QPs a lane, a port that has several lanes, four lanes of which two are down at once.
TEST(LaneReturns, OtherShapes_AreUsedAgain) {
  const test::Variables qps = {{"VERBATIM_QPS_PER_CONNECTION", "3"}};
  in_child(
      "link-down device=1 after=20 for=100ms",
      [] {
        Traffic traffic;
        rounds_until_all_work(traffic);
      },
      qps);
  in_child(
      "link-down device=1 after=8 for=100ms",
      [] {
        Traffic traffic(2, 4);
        rounds_until_all_work(traffic);
      },
      kFourDevices);
  in_child(
      "link-down device=1 after=8 for=100ms; link-down device=3 after=9 for=250ms",
      [] {
        Traffic traffic(4);
        rounds_until_all_work(traffic);
      },
      kFourDevices);
}

// The port has another address when its link comes back.
TEST(LaneReturns, AddressHasChanged_NewOneIsUsed) {
  const std::string output = in_child(
      "link-down device=1 after=12 for=200ms; gid device=1 index=3 address=none after=13;"
      "gid device=1 index=4 address=10.77.9.9 type=rocev2 after=13",
      [] {
        Traffic traffic;
        rounds_until_all_work(traffic);
      },
      {{"SOFTVERBS_ENGINE", "thread"}});
  EXPECT_EQ(count_lines(output, "lane 2 of 2 is back after ", "GID 4 ::ffff:10.77.9.9"), 2U);
}

// The event alone takes the lane down: packets still arrive here.
TEST(LaneReturns, AddressChangesWhileInUse_NewOneIsUsed) {
  const std::string output = in_child(
      "gid device=1 index=4 address=10.77.9.9 type=rocev2 after=12; gid device=1 index=3 address=none after=13",
      [] {
        Traffic traffic;
        rounds_until_all_work(traffic);
      },
      {{"SOFTVERBS_ENGINE", "thread"}});
  EXPECT_GE(count_lines(output, "lane 2 of 2 is down, ", "softverbs1 on HOST reported that its GID has changed"), 1U);
  EXPECT_EQ(count_lines(output, "lane 2 of 2 is back after ", "GID 4 ::ffff:10.77.9.9"), 2U);
}

// Two lanes of one port, of which one comes back while the port has a new address. Then that address changes.
// On a busy machine the first change of the address may come before the link is down: then the first lane is down, too;
// or when the second lane is back: then both have the old address. The test begins again.
TEST(LaneReturns, LanesOfOnePortHaveDifferentAddresses_EachKeepsItsOwn) {
  const auto run = [] {
    return in_child(
        "link-down device=1 after=12 for=200ms; gid device=0 index=3 address=none after=60;"
        "gid device=0 index=4 address=10.77.9.9 type=rocev2 after=60",
        [] {
          Traffic traffic(1, 2);
          rounds_until_all_work(traffic);
          SendComm& sender = traffic.link.send();
          if (sender.describe_path(0).find("10.77.9.9") != std::string::npos) return;
          if (sender.describe_path(1).find("10.77.9.9") == std::string::npos) return;
          for (const Comm* comm : {static_cast<Comm*>(&sender), static_cast<Comm*>(&traffic.link.recv())}) {
            EXPECT_NE(comm->describe_path(0).find("GID 3 ::ffff:10.77.0.1"), std::string::npos);
            EXPECT_EQ(comm->describe_path(0).find("10.77.9.9"), std::string::npos);
            EXPECT_NE(comm->describe_path(1).find("GID 4 ::ffff:10.77.9.9"), std::string::npos);
          }
          const Port& port = *sender.endpoint().ports().front();
          EXPECT_EQ(sender.gids(*port.device, port.port_num).size(), 2U);
          const std::size_t before = outages(traffic);
          sender.gid_changed(*port.device, port.port_num, sender.endpoint().gid(1));
          rounds_until_all_work(traffic, before);
        },
        {{"SOFTVERBS_ENGINE", "thread"}});
  };
  for (int attempt = 0; attempt < 10 && !HasFailure(); ++attempt) {
    const std::string output = run();
    const std::size_t second_down = count_lines(output, "lane 2 of 2 is down, ", "");
    if (count_lines(output, "lane 1 of 2 is down, ", "") != 0 || second_down == 2) continue;
    EXPECT_EQ(second_down, 4U);
    return;
  }
  ADD_FAILURE() << "the lanes never had different addresses";
}

// Packets vanish, no event comes, and the retries take half a minute. A pause of this process may be one more outage.
TEST(LaneReturns, NothingIsAcknowledged_LaneIsSuspected) {
  const std::string output = in_child("unreachable device=1 after=12 for=1s",
                                      [] {
                                        Traffic traffic;
                                        const auto begin = std::chrono::steady_clock::now();
                                        rounds_until_all_work(traffic);
                                        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
                                      },
                                      {{"SOFTVERBS_ENGINE", "thread"},
                                       {"VERBATIM_TIMEOUT", "20"},
                                       {"VERBATIM_RETRY_CNT", "7"},
                                       {"VERBATIM_LANE_TIMEOUT_MS", "100"}});
  EXPECT_GE(
      count_lines(
          output, "lane 2 of 2 is down, ",
          "nothing was acknowledged for 100 ms (VERBATIM_LANE_TIMEOUT_MS), while another lane has acknowledgements"),
      1U);
  EXPECT_GE(count_lines(output, "lane 2 of 2 is back after ", ""), 2U);
}

// The application polls too late: one lane has nothing to do, on the other one an acknowledgement has not been polled.
TEST(LaneReturns, NothingWasPolled_LaneIsNotSuspected) {
  constexpr std::uint64_t kTimeoutNs = 3'600'000'000'000;  // so long that the monitor's own looks suspect nothing
  const std::string output = in_child("",
                                      [] {
                                        Traffic traffic;
                                        Buffers<> buffers(traffic.link, 1);
                                        Request* const receive = traffic.link.posted([&] { return buffers.irecv(1); });
                                        Request* const send = traffic.link.posted([&] { return buffers.isend(1); });
                                        ASSERT_TRUE(ConnectedComms::eventually([&] {
                                          traffic.link.recv().progress();
                                          return receive->state == RequestState::kDone;
                                        }));
                                        traffic.link.send().watch_lanes(monotonic_ns());
                                        traffic.link.send().watch_lanes(monotonic_ns() + kTimeoutNs);
                                        EXPECT_TRUE(traffic.link.send().lanes_change()) << "it is not suspected";
                                        ASSERT_TRUE(traffic.link.wait(send));
                                        traffic.round();
                                      },
                                      {{"SOFTVERBS_ENGINE", "inline"}, {"VERBATIM_LANE_TIMEOUT_MS", "3600000"}});
  EXPECT_EQ(count_lines(output, "", "is down, "), 0U);
}

// The events have no effect while both links are down: no lane would be left. When the first link is up they have.
TEST(LaneReturns, BothLinksAreDown_FirstOneThatIsUpCarriesAll) {
  const std::string output =
      in_child("link-down device=0 after=12 for=100ms; link-down device=1 after=12 for=3s",
               [] {
                 Traffic traffic;
                 rounds_until_all_work(traffic);
               },
               {{"VERBATIM_TIMEOUT", "18"}, {"VERBATIM_RETRY_CNT", "7"}, {"VERBATIM_LANE_TIMEOUT_MS", "0"}});
  EXPECT_GE(count_lines(output, "lane 2 of 2 is down, ", "softverbs1 on HOST reported that its link is down"), 1U);
  EXPECT_GE(count_lines(output, "lane 2 of 2 is back after ", ""), 2U);
}

// Flushes go over the port again, which then has written what is flushed.
TEST(LaneReturns, Flush_UsesThePortAgain) {
  in_child("link-down device=1 after=12 for=100ms", [] {
    Traffic traffic;
    std::vector<std::uint8_t> buffer(64);
    const std::unique_ptr<MemoryHandle> memory = traffic.link.reg(traffic.link.recv(), buffer, MemoryType::kCuda);
    const auto flush = [&] {
      Request* const request = traffic.link.recv().iflush(buffer.data(), *memory);
      ASSERT_NE(request, nullptr);
      EXPECT_TRUE(ConnectedComms::eventually([&] {
        int done = 0;
        RecvComm::test_flush(*request, &done);
        return done == 1;
      }));
    };
    flush();
    rounds_until_all_work(traffic);
    flush();
    EXPECT_EQ(traffic.link.recv().error(), nullptr);
  });
}

// The sender has one port, and the receiver two: the second QP is also on the sender's first port.
TEST(LaneReturns, FirstLaneOfAPortIsDown_PeersNicIsAskedOverAnother) {
  const std::string output = in_child("unreachable device=0 peer=0 after=12", [] {
    Traffic traffic(1, 2);
    traffic.round();
    const int listening = listening_socket(traffic.link);
    ASSERT_GE(listening, 0);
    test::refuse_connections(listening);
    const std::uint32_t before = traffic.link.send().probes_answered();
    ASSERT_NO_FATAL_FAILURE(reset(traffic.link.send()));
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      traffic.link.progress();
      return traffic.link.send().probes_answered() != before;
    }));
    test::accept_connections(listening);
    EXPECT_FALSE(traffic.link.failed());
  });
  EXPECT_GE(count_lines(output, "lane 1 of 2 is down, ", ""), 1U);
}

// Links go down for random times, one or both at once.
TEST(LaneReturns, LinksFlap_NoByteIsWrong) {
  const char* const flaps = std::getenv("FAILOVER_FLAPS");
  const int count = flaps != nullptr ? std::atoi(flaps) : 15;
  const int most = count + 100;  // more of them where the machine is so slow that two outages are seen as one
  std::mt19937 random(1);
  std::string faults;
  std::vector<std::chrono::milliseconds> pauses;
  for (int i = 1; i <= most; ++i) {
    faults += "link-down device=" + std::to_string(random() % 2) + " for=" + std::to_string(random() % 150) +
              "ms qp=1 after=" + std::to_string(i) + ";";
    pauses.emplace_back(1 + random() % 700);
  }
  const std::string output =
      in_child(faults,
               [&] {
                 Trigger trigger;
                 Traffic traffic;
                 for (int i = 0; i < most && (i < count || outages(traffic) < 4) && !HasFailure(); ++i) {
                   trigger.send();
                   const auto end = std::chrono::steady_clock::now() + pauses[static_cast<std::size_t>(i)];
                   do {
                     traffic.rounds(1);
                   } while (!HasFailure() && std::chrono::steady_clock::now() < end);
                 }
                 rounds_until_all_work(traffic);
               },
               {{"SOFTVERBS_DEVICES", "3"}, {"SOFTVERBS_ENGINE", "thread"}, {"VERBATIM_TIMEOUT", "10"}});
  EXPECT_GE(count_lines(output, "lane ", " is back after "), 4U);
}

// All attempts of one message are lost, or all acknowledgements. Not of the first eight, which are CTS entries: on a
// busy machine their retries can end before anything has arrived, and such a connection has never worked.
TEST(OneLane, Outage_ConnectionWaitsAndGoesOn) {
  for (int nth = 12; nth < 48; nth += 2 * step()) {
    for (const char* kind : {"drop-request", "drop-ack"}) {
      for (const char* const adaptive_routing : {"0", "1"}) {
        const std::string fault = std::string(kind) + " device=0 times=all nth=" + std::to_string(nth);
        SCOPED_TRACE(fault);
        const std::string output =
            in_child(fault, [] { Traffic(1).rounds(3); }, {{"VERBATIM_ADAPTIVE_ROUTING", adaptive_routing}});
        EXPECT_EQ(count_lines(output, "lane 1 of 1 is down, the connection waits for up to 60 s until ", ""), 2U);
        EXPECT_EQ(count_lines(output, "lane 1 of 1 is back after ", ""), 2U);
      }
    }
  }
}

// NCCL makes no call for receives with optional completion (LL) until their data has come: the monitor goes on.
void send_without_calls_of_the_receiver() {
  Traffic traffic(1);
  traffic.rounds(1);
  std::vector<std::unique_ptr<Buffers<>>> all;
  for (std::size_t i = 0; i < 8; ++i) {
    all.push_back(std::make_unique<Buffers<>>(traffic.link, pattern(300, i)));
    Request* const request = traffic.link.posted([&] { return all.back()->irecv(300, 0, true); });
    ASSERT_NE(request, nullptr);
    int done = 0;
    ASSERT_EQ(RecvComm::test(*request, &done, nullptr), ErrorKind::kNone);
    ASSERT_EQ(done, 1);
  }
  for (const auto& one : all) {
    Request* request = nullptr;
    ASSERT_TRUE(ConnectedComms::eventually([&] { return (request = one->isend(300)) != nullptr; }));
    ASSERT_TRUE(ConnectedComms::eventually([&] {
      traffic.link.send().progress();
      return request->state == RequestState::kDone;
    }));
    EXPECT_TRUE(one->has_come()) << "wrong bytes";
  }
  traffic.rounds(1);
}

TEST(OneLane, IdleReceiver_OutageEndsWithoutItsCalls) {
  std::size_t outages = 0;
  for (int nth = 20; nth < 50; nth += step() == 1 ? 1 : 7) {
    const char* const engine = nth % 2 == 0 ? "inline" : "thread";
    const std::string fault = "drop-request device=0 times=all nth=" + std::to_string(nth);
    SCOPED_TRACE(fault + " " + engine);
    const std::string output = in_child(fault, send_without_calls_of_the_receiver,
                                        {{"SOFTVERBS_ENGINE", engine}, {"VERBATIM_LANE_TIMEOUT_MS", "200"}});
    outages += count_lines(output, "lane 1 of 1 is back after ", "");
  }
  EXPECT_GE(outages, 8U);
}

// The receiver's calls and the monitor's come at any time.
TEST(OneLane, IdleReceiverBetweenCalls_NoByteIsWrong) {
  std::string faults;
  for (int nth = 40; nth < 200; nth += 40) {
    faults += (faults.empty() ? "" : ";") + std::string(nth % 80 == 0 ? "drop-ack" : "drop-request") +
              " device=0 times=all nth=" + std::to_string(nth);
  }
  for (const auto& [name, value] :
       {std::pair("VERBATIM_COMPLETION", "imm"), std::pair("VERBATIM_COMPLETION", "atomic")}) {
    const std::string output =
        in_child(faults,
                 [] {
                   Traffic traffic(1);
                   traffic.rounds(1);
                   Buffers<> buffers(traffic.link, pattern(300, 1));
                   for (int i = 0; i < 200; ++i) {
                     std::fill(buffers.source.begin(), buffers.source.end(), static_cast<std::uint8_t>(i));
                     Request* const receive = traffic.link.posted([&] { return buffers.irecv(300, 0, true); });
                     ASSERT_NE(receive, nullptr);
                     int done = 0;
                     RecvComm::test(*receive, &done, nullptr);
                     ASSERT_EQ(done, 1);
                     Request* const send = traffic.link.posted([&] { return buffers.isend(300); });
                     ASSERT_TRUE(traffic.link.wait(send));
                     traffic.link.is_completed(send);
                     ASSERT_TRUE(buffers.has_come()) << "wrong bytes in " << i;
                   }
                 },
                 {{"SOFTVERBS_ENGINE", "thread"},
                  {"SOFTVERBS_ATOMICS", "glob"},
                  {"VERBATIM_LANE_TIMEOUT_MS", "200"},
                  {name, value}});
    EXPECT_GE(count_lines(output, "lane 1 of 1 is back after ", ""), 6U) << value;
  }
}

TEST(OneLane, IdleReceiverAndLinkDown_OutageEndsWithoutItsCalls) {
  const std::string output = in_child("link-down device=0 after=20 for=300ms", send_without_calls_of_the_receiver,
                                      {{"VERBATIM_TIMEOUT", "10"}, {"VERBATIM_LANE_TIMEOUT_MS", "200"}});
  EXPECT_GE(count_lines(output, "lane 1 of 1 is back after ", ""), 2U);
}

// Whole messages are posted again: which of their parts have arrived is not known.
TEST(OneLane, OutageOfSeveralQpsOrArrivalWords_NoByteIsWrong) {
  test::Variables both = kAtomics;
  both.emplace_back("VERBATIM_QPS_PER_CONNECTION", "3");
  const test::Variables modes[] = {
      kAtomics,
      {{"VERBATIM_QPS_PER_CONNECTION", "3"}},
      {{"VERBATIM_QPS_PER_CONNECTION", "2"}, {"VERBATIM_ADAPTIVE_ROUTING", "1"}, {"VERBATIM_SPLIT_DATA_ON_QPS", "1"}},
      both};
  for (int nth = 17; nth < 60; nth += 2 * wide_step()) {
    for (std::size_t i = 0; i < 2 * std::size(modes); ++i) {
      if (step() != 1 && i % 2 != (static_cast<std::size_t>(nth) / 10 + i / 2) % 2) continue;  // each takes its pause
      const test::Variables& mode = modes[i / 2];
      const std::string kind = i % 2 == 0 ? "drop-request" : "drop-ack";
      const std::string fault = kind + " device=0 times=all nth=" + std::to_string(nth);
      SCOPED_TRACE(fault + " " + mode.front().first + "=" + mode.front().second);
      const std::string output = in_child(
          fault, [] { Traffic(1).rounds(3); }, mode);
      EXPECT_EQ(count_lines(output, "lane 1 of 1 is down, the connection waits for up to 60 s until ", ""), 2U);
      EXPECT_EQ(count_lines(output, "lane 1 of 1 is back after ", ""), 2U);
    }
  }
}

// The second loss comes while what the first one has lost is posted again.
TEST(OneLane, SeveralOutages_NoByteIsWrong) {
  for (int nth = 13; nth < 20; ++nth) {
    const std::string output =
        in_child("drop-request device=0 times=all nth=12;drop-ack device=0 times=all nth=" + std::to_string(nth) +
                     ";drop-request device=0 times=all nth=" + std::to_string(nth + 4),
                 [] {
                   Traffic traffic(1);
                   traffic.rounds(3);
                   // The last line of an end may come after its last message.
                   EXPECT_TRUE(ConnectedComms::eventually([&] {
                     traffic.link.progress();
                     return traffic.link.send().lanes_down() + traffic.link.recv().lanes_down() == 0;
                   }));
                 });
    EXPECT_GE(count_lines(output, "lane 1 of 1 is back after ", ""), 4U);
  }
}

// Grouped messages lie across the end of the ring, whose entries have been written again several times.
TEST(OneLane, OutageBehindTheFirstRingPass_NoByteIsWrong) {
  for (int nth = 300; nth < 340; nth += 2 * step()) {
    for (const char* kind : {"drop-request", "drop-ack"}) {
      SCOPED_TRACE(std::string(kind) + " " + std::to_string(nth));
      const std::string output =
          in_child(std::string(kind) + " device=0 times=all nth=" + std::to_string(nth), [] { Traffic(1).rounds(26); });
      EXPECT_EQ(count_lines(output, "lane 1 of 1 is back after ", ""), 2U);
    }
  }
}

// Another lane joins between the members of a group, whose turn was that of the first one.
TEST(LaneReturns, GroupHalfFilled_KeepsItsBytes) {
  in_child("link-down device=0 after=6 for=50ms", [] {
    Traffic traffic;
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      traffic.rounds(1);
      return ::testing::Test::HasFailure() || traffic.link.send().lanes_down() == 1;
    }));
    constexpr std::size_t kMember = 5000;
    Buffers<> group(traffic.link, pattern(2 * kMember, 7));
    const RecvBuffer members[] = {{group.target.data(), kMember, 0, group.recv_memory.get()},
                                  {group.target.data() + kMember, kMember, 1, group.recv_memory.get()}};
    std::vector<Request*> requests;
    const MemoryKeys& memory = *group.send_memory;
    requests.push_back(traffic.link.posted([&] { return traffic.link.irecv(members); }));
    requests.push_back(
        traffic.link.posted([&] { return traffic.link.isend(group.source.data(), kMember, 0, memory); }));
    EXPECT_EQ(traffic.link.send().lanes_down(), 1U);
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      traffic.link.progress();
      return traffic.link.send().lanes_down() + traffic.link.recv().lanes_down() == 0;
    }));
    requests.push_back(
        traffic.link.posted([&] { return traffic.link.isend(group.source.data() + kMember, kMember, 1, memory); }));
    for (Request* const request : requests) ASSERT_TRUE(traffic.link.wait(request));
    EXPECT_EQ(group.target, group.source) << "wrong bytes";
    EXPECT_EQ(traffic.link.send().error(), nullptr);
  });
}

// The receiver has a CTS entry outstanding, or not: then nobody learns why the QP is in ERR.
void flush_sender(bool is_explained) {
  Traffic traffic(1);
  traffic.rounds(1);
  Buffers<> buffers(traffic.link, pattern(1000, 3));
  Request* const receive = traffic.link.posted([&] { return buffers.irecv(1000); });
  const Endpoint& endpoint = traffic.link.send().endpoint();
  EXPECT_TRUE(to_error(endpoint.qps().front().qp.get(), *endpoint.ports().front()->device));
  Request* const send = traffic.link.posted([&] { return buffers.isend(1000); });
  if (!is_explained) {
    EXPECT_TRUE(ConnectedComms::fails(traffic.link.send()));
    return;
  }
  Buffers<> more(traffic.link, 1);
  Request* const next = traffic.link.posted([&] { return more.irecv(1); });
  ASSERT_TRUE(traffic.link.wait(receive));
  ASSERT_TRUE(traffic.link.wait(send));
  EXPECT_EQ(buffers.target, buffers.source) << "wrong bytes";
  Request* const last = traffic.link.posted([&] { return more.isend(1); });
  ASSERT_TRUE(traffic.link.wait(next));
  ASSERT_TRUE(traffic.link.wait(last));
  EXPECT_EQ(traffic.link.send().error(), nullptr);
}

TEST(OneLane, FlushedCompletionFirst_WaitsForItsCause) {
  const std::string output = in_child("", [] { flush_sender(true); });
  EXPECT_EQ(count_lines(output, "lane 1 of 1 is down, the connection waits for up to 60 s until ", ""), 2U);
  EXPECT_EQ(count_lines(output, "lane 1 of 1 is down, ", "the peer HOST (pid #) reported that it is down"), 1U);
  EXPECT_EQ(count_lines(output, "lane 1 of 1 is back after ", ""), 2U);
}

TEST(OneLane, FlushedCompletionWithoutCause_ConnectionFails) {
  const std::string output = in_child("", [] { flush_sender(false); });
  EXPECT_EQ(count_lines(output, "sending 1000 bytes failed with Work Request Flushed Error", ""), 1U);
}

TEST(OneLane, OutageIsTooLong_BothEndsSaySo) {
  const std::string output = in_child(from_message("drop-request device=0", 60),
                                      [] {
                                        Traffic traffic(1);
                                        traffic.rounds(1);  // what has never worked is not waited for
                                        EXPECT_TRUE(traffic.fails());
                                        EXPECT_TRUE(ConnectedComms::fails(traffic.link.send()));
                                        EXPECT_TRUE(ConnectedComms::fails(traffic.link.recv()));
                                      },
                                      {{"VERBATIM_RECONNECT_S", "1"}});
  EXPECT_GE(count_lines(output, "no lane to the peer ", " has come back within 1 s (VERBATIM_RECONNECT_S)"), 1U);
}

// Each end waits for the other one on one lane, and for its own port on the other one.
TEST(LaneReturns, EachEndHasLostAPort_BothEndsSaySo) {
  test::Variables variables = kFourDevices;
  variables.emplace_back("VERBATIM_RECONNECT_S", "1");
  const std::string output = in_child(
      "link-down device=2 after=40; link-down device=1 after=40",
      [] {
        Traffic traffic(2, 2, 2);
        traffic.rounds(1);
        EXPECT_TRUE(traffic.fails());
        EXPECT_TRUE(ConnectedComms::fails(traffic.link.send()));
        EXPECT_TRUE(ConnectedComms::fails(traffic.link.recv()));
      },
      variables);
  EXPECT_GE(count_lines(output, "no lane to the peer ",
                        " has come back within 1 s (VERBATIM_RECONNECT_S): the link of softverbs"),
            1U)
      << output;
}

// The event of a QP is a consequence of the outage, that of the device is not.
TEST(OneLane, DeviceFailsInTheOutage_ConnectionFails) {
  const std::string output = in_child(from_message("drop-request device=0", 8), [] {
    Traffic traffic(1);
    SendComm& sender = traffic.link.send();
    const Device& device = *sender.endpoint().ports()[0]->device;
    ASSERT_TRUE(traffic.is_reached([&] { return sender.lane_wait() == LaneWait::kForLane; }));
    sender.set_device_event(IBV_EVENT_QP_FATAL, device);
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);  // longer than a late cause
    while (std::chrono::steady_clock::now() < end) sender.progress();
    EXPECT_EQ(sender.error(), nullptr);
    sender.set_device_event(IBV_EVENT_DEVICE_FATAL, device);
    EXPECT_TRUE(ConnectedComms::fails(sender));
  });
  EXPECT_EQ(count_lines(output, "softverbs0 on ", " reported local catastrophic error (IBV_EVENT_DEVICE_FATAL): "), 1U);
}

// Such a connection has never worked: nobody waits for it.
TEST(OneLane, FirstMessageFails_ConnectionFailsAtOnce) {
  in_child(from_message("drop-request device=0", 1), [] {
    Traffic traffic(1);
    EXPECT_TRUE(traffic.fails());
  });
}

}  // namespace
}  // namespace verbatim
