//: in softverbs_parts_test

// Reads the counters of a process from its segment, and converts them to JSON.
#include "softverbs/host/stats.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <utility>

#include "softverbs/host/shm_file.h"

namespace verbatim::softverbs {
namespace {

class Stats : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(memory.as<void>(), MAP_FAILED);
    segment().pid = getpid();
  }

  Segment& segment() { return *memory.as<Segment>(); }

  // The entry `index`, marked as used.
  SharedQp& qp(std::uint32_t index, std::uint32_t qpn) {
    segment().counters.of(ObjectKind::kQp).table_end.store(index + 1);
    segment().qps[index].qpn.store(qpn);
    return segment().qps[index];
  }

  Mapping memory{
      mmap(nullptr, sizeof(Segment), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0),
      sizeof(Segment)};
};

TEST_F(Stats, IdleProcess_HasZeroCounts) {
  const ProcessStats stats = read_stats(segment());
  EXPECT_EQ(stats.pid, getpid());
  EXPECT_EQ(stats.total_calls(), 0U);
  EXPECT_TRUE(stats.qps.empty());
}

TEST_F(Stats, Sum_IncludesLiveAndDestroyedQps) {
  QpCounters& counters = qp(3, 0x123).counters;
  counters.sends.posts.add(2);
  counters.sends.requests[IBV_WR_RDMA_READ].add(5);
  counters.sends.bytes.add(100);
  counters.send_completions.add(4);
  counters.receive_completions.add(3);
  add_shared(segment().counters.destroyed_qps, counters);
  counters.sends.posts.add(1);
  const ProcessStats stats = read_stats(segment());
  EXPECT_EQ(stats.work.posts, 5U);
  EXPECT_EQ(stats.work.sends[IBV_WR_RDMA_READ], 10U);
  EXPECT_EQ(stats.work.bytes, 200U);
  EXPECT_EQ(stats.work.completions, 14U);
  ASSERT_EQ(stats.qps.size(), 1U);
  EXPECT_EQ(stats.qps[0].qpn, 0x123U);
  EXPECT_EQ(stats.qps[0].work.posts, 3U);
  reset(counters);
  EXPECT_EQ(read_stats(segment()).work.posts, 2U);
}

TEST_F(Stats, UnusedEntries_AreNotCounted) {
  qp(0, 0).counters.sends.posts.add(1);
  segment().counters.of(ObjectKind::kCq).table_end.store(2);
  segment().cqs[0].counters.polls.add(7);
  segment().cqs[1].alive.store(1);
  segment().cqs[1].counters.empty_polls.add(2);
  const ProcessStats stats = read_stats(segment());
  EXPECT_EQ(stats.doorbells(), 0U);
  EXPECT_EQ(stats.polls, 2U);
  EXPECT_EQ(stats.empty_polls, 2U);
}

TEST_F(Stats, Doorbells_CountPostingCalls) {
  QpCounters& counters = qp(0, 1).counters;
  counters.sends.posts.add(1);
  counters.sends.completes.add(2);
  counters.receives.posts.add(4);
  segment().counters.destroyed_srqs.posts.add(8);
  const ProcessStats stats = read_stats(segment());
  EXPECT_EQ(stats.doorbells(), 15U);
  const std::string json = to_json(stats);
  EXPECT_NE(json.find("\"doorbells\":15"), std::string::npos) << json;
  EXPECT_NE(json.find("\"doorbells\":7"), std::string::npos) << json;  // the sum of the QP
}

TEST_F(Stats, Json_ListsEveryEngineThread) {
  EXPECT_NE(to_json(read_stats(segment())).find("\"engine_requests\":[]"), std::string::npos);
  segment().engines[0].requests.add(4);
  segment().engines[2].requests.add(6);
  segment().engine_threads = 3;
  const std::string json = to_json(read_stats(segment()));
  EXPECT_NE(json.find("\"engine_requests\":[4,0,6]"), std::string::npos) << json;
}

TEST_F(Stats, PathAndPort_OfQpWithAddress) {
  SharedQp& shared = qp(0, 0x101);
  const auto contains = [&](const std::string& text) {
    return to_json(read_stats(segment())).find(text) != std::string::npos;
  };
  EXPECT_FALSE(contains("path"));
  EXPECT_FALSE(contains("udp_source_port"));
  shared.path = 1;
  EXPECT_TRUE(contains("\"path\":0"));
  EXPECT_FALSE(contains("udp_source_port"));
  shared.path = 4;
  shared.udp_source_port = 0xc005;
  EXPECT_TRUE(contains("\"path\":3"));
  EXPECT_TRUE(contains("\"udp_source_port\":49157"));
}

TEST_F(Stats, Json_NamesTheTypeOfEachQp) {
  for (const auto& [type, text] : {std::pair(IBV_QPT_RC, "\"type\":\"RC\""), std::pair(IBV_QPT_UC, "\"type\":\"UC\""),
                                   std::pair(IBV_QPT_UD, "\"type\":\"UD\"")}) {
    qp(0, 0x101).type = type;
    EXPECT_NE(to_json(read_stats(segment())).find(text), std::string::npos) << text;
  }
}

TEST_F(Stats, VerbNames_MatchTheVerbs) {
  EXPECT_STREQ(kVerbNames[static_cast<std::size_t>(Verb::kOpenDevice)], "ibv_open_device");
  EXPECT_STREQ(kVerbNames[static_cast<std::size_t>(Verb::kAckAsyncEvent)], "ibv_ack_async_event");
  EXPECT_STREQ(kSendOpcodeNames[IBV_WR_RDMA_READ], "rdma_read");
  EXPECT_STREQ(kSendOpcodeNames[IBV_WR_ATOMIC_FETCH_AND_ADD], "atomic_fetch_and_add");
  EXPECT_STREQ(state_name(IBV_QPS_RTS), "RTS");
  EXPECT_STREQ(state_name(IBV_QPS_UNKNOWN), "?");
}

TEST_F(Stats, FileName_ContainsThePid) {
  EXPECT_EQ(stats_file_name("a", 12), "a");
  EXPECT_EQ(stats_file_name("%p-%p.json", 12), "12-12.json");
  EXPECT_EQ(stats_file_name("100%", 12), "100%");
}

}  // namespace
}  // namespace verbatim::softverbs
