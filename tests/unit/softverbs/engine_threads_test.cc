//: in softverbs_devices_test
//: test softverbs-engines filter=EngineThreads.* timeout=180 use=control

// SOFTVERBS_ENGINES: this number of threads shares the work of all QPs. The counters of softverbs show what each thread
// executed.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <sstream>

#include "support/child.h"
#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

using Clock = std::chrono::steady_clock;
using Requests = std::vector<std::uint64_t>;

constexpr std::size_t kPairs = 16;
constexpr std::uint64_t kBatch = 4;  // outstanding requests of a QP
constexpr std::size_t kBytes = 64 << 10;
constexpr auto kTimeout = 30s;  // on a busy machine the kernel may run the threads late

// The number of requests that each engine thread of this process has executed, from `softverbs stats --json`.
Requests engine_requests() {
  const std::string command =
      std::string(std::getenv("SOFTVERBS_CONTROL")) + " stats --json " + std::to_string(getpid());
  FILE* const output = popen(command.c_str(), "r");
  if (output == nullptr) throw std::runtime_error("popen");
  std::string json;
  char text[4096];
  for (std::size_t length = 0; (length = std::fread(text, 1, sizeof text, output)) > 0;) json.append(text, length);
  EXPECT_EQ(pclose(output), 0);
  const std::string key = "\"engine_requests\": [";
  const std::size_t start = json.find(key);
  if (start == std::string::npos) throw std::runtime_error("no engine_requests in " + json);
  std::istringstream list(json.substr(start + key.size(), json.find(']', start) - start - key.size()));
  Requests requests;
  for (std::string number; std::getline(list, number, ',');) requests.push_back(std::stoull(number));
  return requests;
}

// Executes rounds of WRITEs on all QPs of one process.
class Traffic {
 public:
  Traffic() {
    source_.fill(1);
    for (std::size_t i = 0; i < kPairs; ++i) {
      senders_.push_back(std::make_unique<Endpoint>(device_));
      receivers_.push_back(std::make_unique<Endpoint>(device_));
      connect(*senders_.back(), *receivers_.back());
    }
  }

  void run_round() {
    for (std::uint64_t i = 0; i < kBatch; ++i) {
      for (std::size_t pair = 0; pair < kPairs; ++pair) {
        ASSERT_EQ(post(senders_[pair]->qp(), IBV_WR_RDMA_WRITE, {source_.sge(pair * kBytes, kBytes)},
                       {.wr_id = i, .remote_addr = target_.address(pair * kBytes), .rkey = target_.mr->rkey}),
                  0);
      }
    }
    for (const auto& sender : senders_) {
      for (std::uint64_t i = 0; i < kBatch; ++i) {
        const ibv_wc wc = poll_one(sender->send_cq());
        ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
        ASSERT_EQ(wc.wr_id, i);  // in posting order, although several threads execute the requests
      }
    }
    posted_ += kPairs * kBatch;
  }

  std::uint64_t posted() const { return posted_; }
  void expect_all_arrived() const { EXPECT_EQ(find_wrong_byte(target_.buffer.bytes(), 1), std::nullopt); }

 private:
  Device device_ = open_device();
  Region source_{device_.pd.get(), kPairs* kBytes};
  Region target_{device_.pd.get(), kPairs* kBytes};
  std::vector<std::unique_ptr<Endpoint>> senders_;
  std::vector<std::unique_ptr<Endpoint>> receivers_;
  std::uint64_t posted_ = 0;
};

std::uint64_t sum(const Requests& requests) {
  return std::accumulate(requests.begin(), requests.end(), std::uint64_t{0});
}

// A thread that has not started yet is not in the list.
bool has_each_executed(const Requests& requests, std::size_t engines) {
  return requests.size() == engines && std::count(requests.begin(), requests.end(), 0U) == 0;
}

TEST(EngineThreads, EveryThread_ExecutesRequests_AndTheSumMatches) {
  for (const std::size_t engines : {1U, 2U, 5U}) {
    check_in_child({{"SOFTVERBS_ENGINE", "thread"}, {"SOFTVERBS_ENGINES", std::to_string(engines)}}, [&] {
      Traffic traffic;
      Requests requests;
      const auto end = Clock::now() + kTimeout;
      do {
        traffic.run_round();
        requests = engine_requests();
      } while (!testing::Test::HasFailure() && !has_each_executed(requests, engines) && Clock::now() < end);
      EXPECT_TRUE(has_each_executed(requests, engines)) << testing::PrintToString(requests);
      // The counter is updated after the completions are written.
      while (sum(requests) < traffic.posted() && Clock::now() < end) requests = engine_requests();
      EXPECT_EQ(sum(requests), traffic.posted());
      traffic.expect_all_arrived();
    });
  }
}

TEST(EngineThreads, InlineEngine_HasNoThread) {
  check_in_child({{"SOFTVERBS_ENGINE", "inline"}, {"SOFTVERBS_ENGINES", "3"}}, [] {
    Traffic traffic;
    traffic.run_round();
    EXPECT_EQ(engine_requests(), Requests{});
    traffic.expect_all_arrived();
  });
}

// Posts `count` WRITEs of the whole region in one list, so that the engine finds all of them at once.
void post_writes(const Endpoint& sender, std::size_t count, const Region& source, const Region& target) {
  ibv_sge sge = source.sge();
  std::vector<ibv_send_wr> requests(count);
  for (std::size_t i = 0; i < count; ++i) {
    ibv_send_wr& request = requests[i];
    request.next = i + 1 < count ? &requests[i + 1] : nullptr;
    request.sg_list = &sge;
    request.num_sge = 1;
    request.opcode = IBV_WR_RDMA_WRITE;
    request.send_flags = IBV_SEND_SIGNALED;
    request.wr.rdma = {target.address(), target.mr->rkey};
  }
  ibv_send_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_send(sender.qp(), requests.data(), &bad), 0);
}

TEST(EngineThreads, CompetingQps_SendEqualBytes) {
  check_in_child({{"SOFTVERBS_ENGINE", "thread"}, {"SOFTVERBS_ENGINES", "1"}}, [] {
    constexpr std::size_t kLong = 1 << 20;
    constexpr std::size_t kLongCount = 64;
    constexpr std::size_t kShort = 8 << 10;
    constexpr std::size_t kShortCount = 512;
    const Device device = open_device();
    const Region long_source(device.pd.get(), kLong);
    const Region long_target(device.pd.get(), kLong);
    const Region short_source(device.pd.get(), kShort);
    const Region short_target(device.pd.get(), kShort);
    const Cq cq = create_cq(device, kLongCount + kShortCount);
    Endpoint long_sender(device, {.send_wr = kLongCount, .send_cq = cq.get()});
    Endpoint long_receiver(device);
    connect(long_sender, long_receiver);
    Endpoint short_sender(device, {.send_wr = kShortCount, .send_cq = cq.get()});
    Endpoint short_receiver(device);
    connect(short_sender, short_receiver);

    std::size_t long_between = kLongCount;
    bool is_short_last = true;
    // Repeated when this thread was not scheduled between the two posts, and most long WRITEs ran without competition.
    const auto end = Clock::now() + kTimeout;
    while (is_short_last && Clock::now() < end) {
      post_writes(long_sender, kLongCount, long_source, long_target);
      post_writes(short_sender, kShortCount, short_source, short_target);
      const std::vector<ibv_wc> done = poll(cq.get(), kLongCount + kShortCount);
      ASSERT_EQ(done.size(), kLongCount + kShortCount);
      const auto is_short = [&](const ibv_wc& wc) { return wc.qp_num == short_sender.qp()->qp_num; };
      const auto first = std::find_if(done.begin(), done.end(), is_short);
      const auto last = std::find_if(done.rbegin(), done.rend(), is_short).base();
      long_between = static_cast<std::size_t>(last - first) - kShortCount;
      is_short_last = last == done.end();
    }
    ASSERT_FALSE(is_short_last);
    // The same number of bytes, plus one long WRITE that was already executing and one that ended afterwards.
    EXPECT_LE(long_between, kShortCount * kShort / kLong + 2);
    EXPECT_GE(long_between + 2, kShortCount * kShort / kLong);
  });
}

}  // namespace
}  // namespace verbatim::test
