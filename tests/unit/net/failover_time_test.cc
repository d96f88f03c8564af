// A program of its own: tests/arm64/run leaves out cases of the other one by GTEST_FILTER, which --gtest_filter
// replaces.
//: program unit_net_failover_time sources=support/child.cc link=net,verbs_headers,gtest
//: test unit-net-failover-stops timeout=180 filter=-*Benchmark*
//: benchmark unit-net-failover-time timeout=180 filter=*Benchmark*

// How long the messages of a connection stop when one of its lanes fails: from the last byte before to the next one.
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "failover_traffic.h"
#include "support/benchmark.h"

namespace verbatim {
namespace {

using GapClock = std::chrono::steady_clock;
using GapMs = std::chrono::duration<double, std::milli>;

constexpr int kMostOutages = 30;  // some may begin and end within one message, and are not seen

// `clause` with a time for each outage.
std::string outages(const std::string& clause, int period_ms) {
  std::string faults;
  for (int i = 1; i <= kMostOutages; ++i) faults += clause + " at=" + std::to_string(i * period_ms) + "ms;";
  return faults;
}

struct Gaps {
  std::vector<double> of_failures;  // milliseconds
  std::vector<double> usual;
};

// Sends striped messages until so many lanes have failed.
Gaps measure_gaps(Traffic& traffic, std::size_t failures) {
  constexpr std::size_t kBytes = 600'000;
  Buffers<> buffers(traffic.link, pattern(kBytes, 5));
  const auto down = [&] { return traffic.link.send().lanes_down() + traffic.link.recv().lanes_down(); };
  Gaps gaps;
  GapClock::time_point last = GapClock::now();
  const GapClock::time_point begin = last;
  bool was_down = false;
  while (gaps.of_failures.size() < failures && last - begin < std::chrono::seconds(100)) {
    Request* const receive = traffic.link.posted([&] { return buffers.irecv(kBytes); });
    Request* const send = traffic.link.posted([&] { return buffers.isend(kBytes); });
    if (receive == nullptr || send == nullptr || !traffic.link.wait(send) || !traffic.link.wait(receive)) break;
    traffic.link.is_completed(send);
    traffic.link.is_completed(receive);
    const GapClock::time_point now = GapClock::now();
    const bool is_down = down() != 0;
    if (is_down == was_down) {
      gaps.usual.push_back(GapMs(now - last).count());
    } else if (is_down) {
      gaps.of_failures.push_back(GapMs(now - last).count());
    }
    was_down = is_down;
    last = now;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(gaps.of_failures.size(), failures);
  return gaps;
}

const std::string kLinkIsDown = outages("link-down device=1 for=300ms", 1000);
const std::string kPacketsVanish = outages("unreachable device=1 for=200ms", 1500);

// `timeout`: VERBATIM_TIMEOUT.
void measure(const std::string& faults, const char* lane_timeout_ms, const char* timeout, std::size_t failures,
             const std::function<void(const Gaps&)>& report) {
  const auto body = [&] {
    Traffic traffic;
    report(measure_gaps(traffic, failures));
  };
  in_child(faults, body,
           {{"SOFTVERBS_ENGINE", "thread"},
            {"VERBATIM_TIMEOUT", timeout},
            {"VERBATIM_RETRY_CNT", "7"},
            {"VERBATIM_LANE_TIMEOUT_MS", lane_timeout_ms}});
}

// The device waits 8.6 s for an acknowledgement before it sends a packet again: nobody may wait for that.
void goes_on_before_a_retry(const std::string& faults, const char* lane_timeout_ms) {
  measure(faults, lane_timeout_ms, "21", 3, [](const Gaps& gaps) {
    constexpr double kMostMs = 5000;
    for (const double gap : gaps.of_failures) EXPECT_LT(gap, kMostMs);
  });
}

TEST(FailoverTime, LinkIsDown_NextByteComesBeforeARetry) {
  goes_on_before_a_retry(kLinkIsDown, "0");
}

TEST(FailoverTime, PacketsVanish_NextByteComesBeforeARetry) {
  goes_on_before_a_retry(kPacketsVanish, "100");
}

void print_gaps(const std::string& what, const std::string& faults, const char* lane_timeout_ms) {
  measure(faults, lane_timeout_ms, "15", 15, [&](const Gaps& gaps) {
    test::print_benchmark("last byte to next byte, " + what, "ms", gaps.of_failures);
    test::print_benchmark("last byte to next byte, " + what + ", without a failure", "ms", gaps.usual);
  });
}

TEST(FailoverTimeBenchmark, LinkIsDown) {
  print_gaps("a link goes down", kLinkIsDown, "0");
}

TEST(FailoverTimeBenchmark, PacketsVanish) {
  print_gaps("packets vanish", kPacketsVanish, "100");
}

}  // namespace
}  // namespace verbatim
