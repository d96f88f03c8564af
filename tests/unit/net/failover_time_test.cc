// How long the messages of a connection stop when one of its lanes fails: from the last byte before to the next one.
#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "failover_traffic.h"

namespace verbatim {
namespace {

using GapClock = std::chrono::steady_clock;
using GapMs = std::chrono::duration<double, std::milli>;

// With FAILOVER_EVERY=1 the aim, otherwise something far below any retry of the device. A busy machine delays each
// step, so ten usual gaps between two messages of the same run are added.
bool is_exact() {
  return step() == 1;
}
const GapMs kAim{is_exact() ? 20 : 500};
constexpr int kUsualGaps = 10;
const int kOutages = is_exact() ? 15 : 3;

// `clause` with a time for each outage.
std::string outages(const std::string& clause, int period_ms) {
  std::string faults;
  for (int i = 1; i <= 2 * kOutages; ++i) faults += clause + " at=" + std::to_string(i * period_ms) + "ms;";
  return faults;
}

GapMs median(std::vector<GapMs>& gaps) {
  if (gaps.empty()) return GapMs{0};
  std::sort(gaps.begin(), gaps.end());
  return gaps[gaps.size() / 2];
}

// Sends striped messages until so many lanes have failed, and compares the gaps between them.
void expect_short_gaps(Traffic& traffic, GapMs limit) {
  constexpr std::size_t kBytes = 600'000;
  Buffers<> buffers(traffic.link, pattern(kBytes, 5));
  const auto down = [&] { return traffic.link.send().lanes_down() + traffic.link.recv().lanes_down(); };
  std::vector<GapMs> gaps;
  std::vector<GapMs> usual;
  GapClock::time_point last = GapClock::now();
  const GapClock::time_point begin = last;
  bool was_down = false;
  while (static_cast<int>(gaps.size()) < kOutages && last - begin < std::chrono::seconds(100)) {
    Request* const receive = traffic.link.posted([&] { return buffers.irecv(kBytes); });
    Request* const send = traffic.link.posted([&] { return buffers.isend(kBytes); });
    if (receive == nullptr || send == nullptr || !traffic.link.wait(send) || !traffic.link.wait(receive)) break;
    traffic.link.is_completed(send);
    traffic.link.is_completed(receive);
    const GapClock::time_point now = GapClock::now();
    const bool is_down = down() != 0;
    if (is_down != was_down) {
      if (is_down) gaps.push_back(now - last);
    } else {
      usual.push_back(now - last);
    }
    was_down = is_down;
    last = now;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(static_cast<int>(gaps.size()), kOutages);
  const GapMs of_usual = median(usual);
  EXPECT_LT(median(gaps).count(), (limit + kUsualGaps * of_usual).count()) << of_usual.count();
}

void stops_for_at_most(const std::string& faults, GapMs limit, const test::Variables& more = {}) {
  test::Variables variables = {{"SOFTVERBS_ENGINE", "thread"}, {"VERBATIM_TIMEOUT", "15"}, {"VERBATIM_RETRY_CNT", "7"}};
  variables.insert(variables.end(), more.begin(), more.end());
  const auto body = [limit] {
    Traffic traffic;
    expect_short_gaps(traffic, limit);
  };
  in_child(faults, body, variables);
}

TEST(FailoverTime, LinkIsDown_NextByteComesSoon) {
  stops_for_at_most(outages("link-down device=1 for=50ms", 1000), kAim, {{"VERBATIM_LANE_TIMEOUT_MS", "0"}});
}

TEST(FailoverTime, PacketsVanish_NextByteComesAfterTheTimeout) {
  constexpr GapMs kTimeout{100};
  stops_for_at_most(outages("unreachable device=1 for=200ms", 1500), kTimeout + kAim,
                    {{"VERBATIM_LANE_TIMEOUT_MS", "100"}});
}

}  // namespace
}  // namespace verbatim
