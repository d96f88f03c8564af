#include "verbs/port_history.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/clock.h"
#include "support/scratch_directory.h"

namespace verbatim {
namespace {

constexpr std::uint64_t kSecond = kNanosecondsPerSecond;

void write_counter(const std::string& directory, const std::string& name, const std::string& value) {
  std::filesystem::create_directories(directory);
  std::ofstream(directory + "/" + name) << value << "\n";
}

TEST(PortCounters, BothDirectories_AreReadWithoutTrafficCounters) {
  const ScratchDirectory scratch;
  const std::string port = scratch.path().string() + "/ports/1";
  write_counter(port + "/hw_counters", "local_ack_timeout_err", "12");
  write_counter(port + "/hw_counters", "rx_write_requests", "777");
  write_counter(port + "/hw_counters", "lifespan", "10");
  write_counter(port + "/hw_counters", "np_ecn_marked_roce_packets", "5");
  write_counter(port + "/hw_counters", "broken", "N/A (no PMA)");
  write_counter(port + "/counters", "port_xmit_data", "99999");
  write_counter(port + "/counters", "link_downed", "2");
  EXPECT_EQ(read_port_counters(scratch.path(), 1),
            (PortCounters{{"link_downed", 2}, {"local_ack_timeout_err", 12}, {"np_ecn_marked_roce_packets", 5}}));
  EXPECT_TRUE(read_port_counters(scratch.path(), 2).empty());
  EXPECT_TRUE(read_port_counters("", 1).empty());
}

TEST(PortCounters, GrownCounters_AreListedMostRelevantFirst) {
  const PortCounters before{{"a", 1}, {"out_of_sequence", 3}, {"local_ack_timeout_err", 0}, {"z", 9}};
  EXPECT_EQ(describe_changes(before, before, 6), "");
  const PortCounters now{{"a", 2}, {"out_of_sequence", 4}, {"local_ack_timeout_err", 8}, {"z", 8}, {"new", 1}};
  EXPECT_EQ(describe_changes(before, now, 6), "local_ack_timeout_err +8, out_of_sequence +1, a +1");
  EXPECT_EQ(describe_changes(before, now, 2), "local_ack_timeout_err +8, out_of_sequence +1 and 1 more");
}

TEST(PortHistory, SeveralOutages_AreCountedSinceAGivenTime) {
  PortHistory history("");
  EXPECT_EQ(history.link_up(1, kSecond), 0U) << "the link was never down";
  EXPECT_TRUE(history.link_down(1, 10 * kSecond));
  EXPECT_FALSE(history.link_down(1, 11 * kSecond)) << "the link is down already";
  EXPECT_EQ(history.link_up(1, 13 * kSecond), 3 * kSecond);
  EXPECT_TRUE(history.link_down(1, 20 * kSecond));

  const LinkRecord all = history.link_since(1, 5 * kSecond, 25 * kSecond);
  EXPECT_EQ(all.downs, 2U);
  EXPECT_TRUE(all.down);
  EXPECT_EQ(all.outage_ns, 5 * kSecond);
  EXPECT_EQ(history.link_since(1, 15 * kSecond, 25 * kSecond).downs, 1U);
  EXPECT_EQ(history.link_up(1, 30 * kSecond), 10 * kSecond);
  const LinkRecord later = history.link_since(1, 40 * kSecond, 50 * kSecond);
  EXPECT_EQ(later.downs, 0U);
  EXPECT_FALSE(later.down);
  EXPECT_EQ(history.link_since(2, 0, 50 * kSecond).downs, 0U) << "another port";
}

TEST(PortHistory, ManyOutages_LastAreKept) {
  PortHistory history("");
  for (std::uint64_t i = 1; i <= 100; ++i) {
    EXPECT_TRUE(history.link_down(1, i * kSecond));
    history.link_up(1, i * kSecond + 1);
  }
  EXPECT_EQ(history.link_since(1, 99 * kSecond, 200 * kSecond).downs, 2U);
  EXPECT_EQ(history.link_since(1, 0, 200 * kSecond).outage_ns, 1U);
}

TEST(PortHistory, RecentCounters_SnapshotIsKept) {
  const ScratchDirectory scratch;
  write_counter(scratch.path().string() + "/ports/1/hw_counters", "packet_seq_err", "1");
  PortHistory history(scratch.path());
  const auto first = history.recent_counters(1);
  EXPECT_EQ(first->at("packet_seq_err"), 1U);
  write_counter(scratch.path().string() + "/ports/1/hw_counters", "packet_seq_err", "4");
  EXPECT_EQ(describe_changes(*first, history.counters(1), 6), "packet_seq_err +3");
}

}  // namespace
}  // namespace verbatim
