#include "net/context/stats.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <thread>

#include "connected_comms.h"
#include "net/transfer/latencies.h"
#include "support/scratch_directory.h"

namespace verbatim {
namespace {

std::string read(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(Stats, PathPlaceholders_AreReplaced) {
  EXPECT_EQ(expand_path("/tmp/x.json", "h"), "/tmp/x.json");
  EXPECT_EQ(expand_path("%h-%p-%q%", "h"), "h-" + std::to_string(::getpid()) + "-%q%");
}

TEST(Stats, PeerTextWithControlCharacters_IsEscaped) {
  ConnectionStats stats;
  stats.peer_host = "a\"b\\c\n\x01";
  EXPECT_NE(stats_json("h", 1, {&stats, 1}).find("\"peer\":\"a\\\"b\\\\c\","), std::string::npos);
}

TEST(Stats, UnwritableFile_IsError) {
  EXPECT_FALSE(write_stats("/nonexistent/directory/stats.json", "{}"));
}

TEST(Latency, EveryDuration_IsInBucketOfASixteenth) {
  const auto place_of = [](std::uint64_t ticks) {
    return LatencyHistogram::place_of(LatencyHistogram::bucket_of(ticks));
  };
  std::size_t last = 0;
  for (std::uint64_t ticks = 1; ticks < (std::uint64_t{1} << 50); ticks += 1 + ticks / 97) {
    const std::size_t place = place_of(ticks);
    const std::uint64_t first = LatencyHistogram::first_of(place);
    const std::uint64_t end = LatencyHistogram::first_of(place + 1);
    ASSERT_GE(place, last) << ticks;
    ASSERT_TRUE(first <= ticks && ticks <= end) << ticks;
    ASSERT_LE(end - first, std::max(ticks / 16, std::uint64_t{1})) << ticks;
    last = place;
  }
  EXPECT_EQ(place_of(0), place_of(2));
  // The counters of two CPUs may differ.
  EXPECT_EQ(place_of(~std::uint64_t{0}), place_of(1));
}

// A receive that irecv refuses at first waits; one with optional completion has no latency, and its wait no other one.
TEST(Latency, RefusedReceives_WaitOnlyIfTheyAreTested) {
  const auto total_ns = [](const LatencyCounts& counts) {
    std::uint64_t total = 0;
    for (const LatencyBucket& bucket : counts.buckets) total += bucket.below_ns * bucket.count;
    return total;
  };
  begin_tick_scale();
  const auto latencies = std::make_unique<ReceiveLatencies>();
  for (const bool optional : {true, false}) {
    latencies->refused();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (optional) latencies->posted_optional();
    latencies->posted(5);
    latencies->done(5);
    const LatencyStats stats = latencies->read();
    const bool waited = total_ns(stats[0]) >= total_ns(stats[1]) + 15'000'000;
    EXPECT_EQ(waited, !optional);
  }
}

// When messages have gone over a connection and the context ends / expect the file to say what they were.
TEST(Stats, ContextClosed_FileHasTotalsOfBothEnds) {
  const ScratchDirectory directory;
  const std::string path = (directory.path() / "stats.json").string();
  ::setenv("VERBATIM_STATS", path.c_str(), 1);
  {
    ConnectedComms link;
    ASSERT_NO_FATAL_FAILURE(link.connect());
    Buffers ends(link, pattern(1000, 1));
    for (const std::size_t members : {1UL, 3UL, 1UL}) {
      std::vector<RecvBuffer> buffers;
      for (std::size_t i = 0; i < members; ++i) {
        buffers.push_back({&ends.target[i * 100], 100, static_cast<int>(i), ends.recv_memory.get()});
      }
      Request* receive = link.posted([&] { return link.irecv(buffers); });
      std::vector<Request*> sends;
      for (std::size_t i = 0; i < members; ++i) {
        sends.push_back(link.posted(
            [&] { return link.isend(&ends.source[i * 100], 100 - members, static_cast<int>(i), *ends.send_memory); }));
      }
      for (Request* send : sends) {
        ASSERT_TRUE(link.wait(send));
        link.is_completed(send);
      }
      ASSERT_TRUE(link.wait(receive));
      link.is_completed(receive);
    }
  }
  ::unsetenv("VERBATIM_STATS");
  const std::string json = read(path);
  EXPECT_TRUE(json.starts_with("{\"schema\":1,\"host\":")) << json;
  const std::string bytes = std::to_string(2 * 99 + 3 * 97);
  EXPECT_NE(json.find("\"totals\":{\"send\":{\"connections\":1,\"messages\":5,\"bytes\":" + bytes + "}"),
            std::string::npos)
      << json;
  EXPECT_NE(json.find("\"recv\":{\"connections\":1,\"messages\":5,\"bytes\":" + bytes +
                      ",\"optional\":0,\"receives_by_members\":[2,0,1,0,0,0,0,0]}"),
            std::string::npos)
      << json;
}

}  // namespace
}  // namespace verbatim
