// Lost packets: lines, state and errors.
//: program rma_stall sources=ranks.cc link=netapi,base,json,threads,gtest
//: test rma-stall

// Puts that do not complete: the lines, the state and the error. Each rank is a process; packets of rank 0 are lost.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "netapi/log.h"
#include "ranks.h"
#include "support/state_reader.h"

namespace rma_test {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::json;

// An application that has not polled for a quarter of VERBATIM_STALL_WARN_S counts as late. When the system has not
// scheduled the test's thread for so long, that report is correct.
constexpr std::chrono::milliseconds kLongestPause{150};
constexpr std::chrono::seconds kLimit{30};
// A lost packet is sent again after 4.096 us * 2^18 = 1.07 s.
constexpr const char* kTimeout = "18";

class RmaStall : public ::testing::Test {
 protected:
  RmaStall() {
    ::setenv("VERBATIM_STALL_WARN_S", "1", 1);
    ::setenv("VERBATIM_TIMEOUT", kTimeout, 1);
    ::setenv("VERBATIM_STATE_SOCKET", (path_ + "%p").c_str(), 1);
  }
  ~RmaStall() override {
    for (const char* name : {"VERBATIM_STALL_WARN_S", "VERBATIM_TIMEOUT", "VERBATIM_STATE_SOCKET"}) ::unsetenv(name);
  }

  // Before the first call of the plugin. Keeps the lines about stalls and failures for the test.
  void begin(const Rank& rank, const char* faults_of_rank_0) {
    if (rank.number() == 0) ::setenv("SOFTVERBS_FAULTS", faults_of_rank_0, 1);
    char* const text = ranks_.text(rank.number());
    netapi::set_log_callback([text](const netapi::LogLine& line) {
      if (line.level != nccl::DebugLogLevel::kWarn && line.text.find("progress again") == std::string::npos) return;
      Ranks::add_line(text, line.text);
    });
  }
  // What the process says of a context and a peer; null: nothing was begun.
  Json state_of(std::uint32_t context, std::uint32_t peer) const {
    const Json state = Json::parse(verbatim::read_state(path_ + std::to_string(::getpid())));
    for (const Json& queue : state["rma"][0]["queues"]) {
      if (queue["context"] == context && queue["peer"] == peer) return queue;
    }
    return nullptr;
  }
  static void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " is missing in: " << text;
    }
  }
  static std::size_t count(const std::string& text, const std::string& part) {
    std::size_t found = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
    return found;
  }

  const std::string path_ = ::testing::TempDir() + "rma-stall-" + std::to_string(::getpid()) + "-";
  Ranks ranks_{3, 14};
};

TEST_F(RmaStall, LostPut_IsReportedWithPeerContextAndPathUntilItArrives) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    begin(rank, "drop-request op=write qp=any nth=3 times=5");
    rank.connect();
    rank.create({.contexts = 2});
    Words words(512);
    void* const memory = rank.register_memory(words.data(), words.bytes());
    if (rank.number() == 0) {
      EXPECT_TRUE(rank.wait_ok(rank.put(0, {memory, 0}, 8, {memory, 8}, 2)));
      EXPECT_TRUE(rank.wait_ok(rank.put(1, {memory, 0}, 8, {memory, 8}, 1)));
      void* const lost = rank.put_signal(1, {memory, 0}, 64, {memory, 64}, 1, {.word = {memory, 1024}, .value = 5});
      bool stalled = false;
      Clock::duration longest{};
      Clock::time_point last = Clock::now();
      const Clock::time_point end = last + kLimit;
      for (int done = 0; done == 0 && Clock::now() < end; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
        EXPECT_OK(rank.net().test(rank.coll, lost, &done));
        const Clock::time_point now = Clock::now();
        longest = std::max(longest, now - std::exchange(last, now));
        if (done != 0 || stalled || std::strstr(ranks_.text(0), "stalled for") == nullptr) continue;
        stalled = true;
        const Json queue = state_of(1, 1);
        EXPECT_EQ(queue["posted"], (Json{{"puts", 2}, {"signals", 1}, {"gets", 0}, {"flushes", 0}}));
        EXPECT_EQ(queue["completed"]["puts"], 1);
        EXPECT_EQ(queue["completed"]["signals"], 0);
        EXPECT_EQ(queue["completed"]["put_bytes"], 8);
        EXPECT_EQ(queue["outstanding"], 1);
        EXPECT_EQ(queue["stalled"], true);
        EXPECT_GE(queue["no_progress_ms"], 900);
        EXPECT_EQ(state_of(0, 2)["stalled"], false);
        EXPECT_EQ(state_of(0, 1), nullptr);
        last = Clock::now();
      }
      EXPECT_TRUE(stalled);
      const auto has_ended = [&] { return std::strstr(ranks_.text(0), "progress again") != nullptr; };
      while (!has_ended() && Clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_TRUE(has_ended());
      const Json queue = state_of(1, 1);
      EXPECT_EQ(queue["completed"]["signals"], 1);
      EXPECT_EQ(queue["completed"]["put_bytes"], 72);
      EXPECT_EQ(queue["outstanding"], 0);
      EXPECT_EQ(queue["stalled"], false);
      EXPECT_EQ(queue["no_progress_ms"], 0);
      EXPECT_FALSE(rank.has_error());
      ranks_.number(0) = longest < kLongestPause ? 1 : 0;
    }
    rank.close();
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
  const std::string text = ranks_.text(0);
  EXPECT_EQ(count(text, "stalled for"), 1U) << text;
  EXPECT_EQ(count(text, "\n"), 2U) << text;
  expect_parts(text, {"rank 0 to rank 1 on ", "RMA context 1", "outstanding: 1 put with a signal", "completed: 1",
                      ". Next: ", ". Path: ", "softverbs0:1", "softverbs1:1", " QP ", "RMA from rank 0 to rank 1 on ",
                      "makes progress again, after "});
  if (ranks_.number(0) != 0) expect_parts(text, {"the network, or the device: "});
  EXPECT_STREQ(ranks_.text(1), "");
  EXPECT_STREQ(ranks_.text(2), "");
}

TEST_F(RmaStall, FailingTime_FailsPutTestAndLastErrorAtAllRanks) {
  ::setenv("VERBATIM_STALL_FAIL_S", "2", 1);
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    begin(rank, "drop-request op=write qp=any times=all");
    rank.connect();
    rank.create({.contexts = 2});
    Words words(512);
    void* const memory = rank.register_memory(words.data(), words.bytes());
    if (rank.number() == 0) {
      const Clock::time_point begun = Clock::now();
      EXPECT_EQ(rank.wait(rank.put(1, {memory, 0}, 8, {memory, 8}, 1)), nccl::Result::kRemoteError);
      EXPECT_GE(Clock::now() - begun, std::chrono::milliseconds(1500));  // it counts from the check before the put
      EXPECT_TRUE(rank.has_error());
      void* request = nullptr;
      EXPECT_EQ(rank.net().iput(rank.contexts, 0, {memory, 0}, 8, {memory, 8}, 2, &request),
                nccl::Result::kRemoteError);
      EXPECT_EQ(request, nullptr);
      const Json state = Json::parse(verbatim::read_state(path_ + std::to_string(::getpid())));
      EXPECT_EQ(state["rma"][0]["failed"], true);
      EXPECT_NE(state["rma"][0]["error"].get<std::string>().find("VERBATIM_STALL_FAIL_S"), std::string::npos);
    } else {
      const Clock::time_point end = Clock::now() + kLimit;
      while (!rank.has_error() && Clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_TRUE(rank.has_error());
    }
    rank.barrier();
    EXPECT_OK(rank.net().close_coll(rank.coll));
    EXPECT_OK(rank.net().finalize(rank.instance));
  });
  ::unsetenv("VERBATIM_STALL_FAIL_S");
  for (const int status : statuses) EXPECT_EQ(status, 0);
  expect_parts(ranks_.text(0), {"rank 0 to rank 1 on ", "RMA context 1: stalled for ", "(VERBATIM_STALL_FAIL_S)",
                                "outstanding: 1 put", ". Next: ", ". Path: ", "softverbs0:1", "softverbs1:1"});
  for (const int rank : {1, 2}) expect_parts(ranks_.text(rank), {"has failed at rank 0 on ", "VERBATIM_STALL_FAIL_S"});
}

TEST_F(RmaStall, ApplicationThatDoesNotTest_IsNamedAsLate) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    begin(rank, "");
    rank.connect();
    rank.create({.contexts = 2});
    Words words(512);
    void* const memory = rank.register_memory(words.data(), words.bytes());
    if (rank.number() == 0) {
      std::vector<void*> puts;
      for (const int context : {0, 1}) puts.push_back(rank.put(context, {memory, 0}, 8, {memory, 8}, 1));
      const auto has = [&](const char* part) { return std::strstr(ranks_.text(0), part) != nullptr; };
      const Clock::time_point end = Clock::now() + kLimit;
      while (!has("stalled for") && Clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      for (void* const put : puts) EXPECT_TRUE(rank.wait_ok(put));
      while (!has("progress again") && Clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    rank.close();
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
  const std::string text = ranks_.text(0);
  EXPECT_EQ(count(text, "\n"), 2U) << text;
  expect_parts(text, {"this process is late: its application does not test its requests for the peer rank 1 on ",
                      "the same in the contexts 1 of this peer", "progress again"});
}

}  // namespace
}  // namespace rma_test
