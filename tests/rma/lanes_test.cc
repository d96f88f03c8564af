// Lanes that fail. Tests that begin a fault while they run need the tools.
//: program rma_lanes sources=ranks.cc link=netapi,base,threads,gtest
//: all SOFTVERBS_ATOMICS=glob SOFTVERBS_DEVICES=4
//:   when has=softverbs_control SOFTVERBS_CONTROL={softverbs_control}
//: test rma-lanes-{} timeout=240 filter=RmaLanes.*
//:   {engine} engine=thread,inline SOFTVERBS_ENGINE={engine}
//:   adaptive-routing full SOFTVERBS_ORDERING=adaptive-routing
//:   {set} set=short-queues,ib full use={set}
// As these drivers are, but for what leaves no other lane: RmaLanes.DriverAsItIs*. A link that comes back has its GIDs
// at other indices, so that a lane is not kept.
//:   {driver} driver=mlx5,bnxt_re,irdma full use=lanes SOFTVERBS_PROFILE={driver}
//:   + filter=-*DeviceDoesNotSay*:*DriverAsItIs*:*NotKnownWhat*:*LaneIsKept
//: set lanes SOFTVERBS_RQ_PSN=exact SOFTVERBS_QP_REUSE=allowed
// A driver whose addresses are at other indices when a link returns, and whose software completes what is flushed.
//: test rma-lanes-gids use=lanes filter=RmaLanes.LinkComesBack*:RmaLanes.PortIsDownBefore*:RmaLanes.GidChanges*
//:   + SOFTVERBS_ENGINE=inline SOFTVERBS_PROFILE=bnxt_re
//: test rma-lanes-interfaces filter=RmaInterfaces.*
//: test rma-lanes-threads threads timeout=240 filter=*BothEnds*:*PacketsVanish*:*FlapUnderTraffic*

// Lanes that fail under puts, gets and signals: no byte is wrong, and each signal counts once. Each of the two ranks is
// a process with two ports, merged by the network's table as NCCL does it: rank 0 has the devices 0 and 2, rank 1 has 1
// and 3. Faults are those of rank 0's process, from its start or when a test begins them.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "base/unique_fd.h"
#include "netapi/log.h"
#include "netapi/plugin.h"
#include "ranks.h"
#include "support/wait.h"

namespace rma_test {
namespace {

using namespace std::chrono_literals;
using verbatim::test::Wait;
using Clock = std::chrono::steady_clock;

constexpr int kContexts = 2;
constexpr std::size_t kMessages = 40;  // of a context, to the other rank
constexpr std::size_t kSlotWords = 2048;
constexpr std::size_t kUnderWay = 6;
constexpr std::chrono::seconds kLimit{40};
constexpr std::uint64_t kUsed = 0x5afe;
// "lane 1 of 2 (PORT) works again". A failure has "lane 2 (PORT) is used until it works again".
constexpr char kWorksAgain[] = ") works again";

// Some of one packet, some of five.
std::size_t words_of(std::size_t message) {
  return 1 + (message * 397) % kSlotWords;
}

std::uint64_t word_of(int rank, int context, std::size_t message, std::size_t word) {
  return (static_cast<std::uint64_t>(rank + 1) << 48) + (static_cast<std::uint64_t>(context + 1) << 40) +
         (static_cast<std::uint64_t>(message + 1) << 20) + word;
}

class RmaLanes : public ::testing::Test {
 protected:
  using Variable = std::pair<const char*, const char*>;

  ~RmaLanes() override {
    for (const char* name : {"VERBATIM_TIMEOUT", "VERBATIM_LANE_TIMEOUT_MS", "VERBATIM_STALL_WARN_S",
                             "VERBATIM_FAILOVER", "VERBATIM_RECONNECT_S"})
      ::unsetenv(name);
    ::setenv("SOFTVERBS_DEVICES", "4", 1);
    ::setenv("SOFTVERBS_ATOMICS", "glob", 1);
  }

  // Before the first call of the plugin.
  void begin(const Rank& rank, const std::string& faults) {
    if (rank.number() == 0 && !faults.empty()) ::setenv("SOFTVERBS_FAULTS", faults.c_str(), 1);
    char* const text = ranks_.text(rank.number());
    netapi::set_log_callback([text](const netapi::LogLine& line) {
      const bool is_wanted =
          line.text.find("lane") != std::string::npos || line.text.find("TCP connection") != std::string::npos;
      if (!is_wanted && line.level != nccl::DebugLogLevel::kWarn) return;
      Ranks::add_line(text, line.text);
    });
    netapi::Opened opened = netapi::open_plugin(std::getenv("PLUGIN"));
    ASSERT_NE(opened.plugin, nullptr) << opened.error;
    net_ = opened.plugin.release();  // until the process ends
    int device = 0;
    ASSERT_OK(net_->init(1, {}, &net_context_));
    ASSERT_OK(net_->devices(&device));
    std::vector<int> devices;
    for (int lane = 0; lane < ports_[rank.number()]; ++lane) devices.push_back(rank.number() + 2 * lane);
    if (devices.size() > 1) {
      ASSERT_OK(net_->make_vdevice(devices, &device));
    }
  }

  // A barrier at which the ranks go on to poll: a lane comes back only while both ends make calls.
  static void meet(Ranks& ranks, Rank& rank) {
    const std::uint64_t arrived = ranks.number(1).fetch_add(1) + 1;
    Wait wait(2 * verbatim::test::kPatience);  // the other one may wait that long for its event
    while (ranks.number(1) < (arrived + 1) / 2 * 2) {
      static_cast<void>(rank.net().progress(rank.contexts));
      if (wait.is_over()) {
        ADD_FAILURE() << "the other rank has not come " << wait.report();
        return;
      }
      wait.rest();
    }
  }
  void meet(Rank& rank) { meet(ranks_, rank); }

  // What one rank does: in each context it puts messages with a signal into slots of the other rank, and reads the
  // slots that have arrived. A slot that was read is used for something else: a put that is executed again would be
  // seen.
  class Traffic {
   public:
    // `on_sent`: called with the number of its messages after each.
    Traffic(Ranks& ranks, Rank& rank, std::function<void(std::size_t)> on_sent = {})
        : ranks_(ranks), rank_(rank), on_sent_(std::move(on_sent)) {
      for (int context = 0; context < kContexts; ++context) {
        for (std::size_t message = 0; message < kMessages; ++message) {
          for (std::size_t i = 0; i < kSlotWords; ++i) {
            source_[slot(context, message) + i] = word_of(rank.number(), context, message, i);
          }
        }
      }
      source_memory_ = rank.register_memory(source_.data(), source_.bytes());
      memory_ = rank.register_memory(slots_.data(), slots_.bytes());
      got_memory_ = rank.register_memory(got_.data(), got_.bytes());
      signal_memory_ = rank.register_memory(signals_.data(), signals_.bytes());
    }

    // A pass: all messages in both directions. False: a call has failed.
    bool run() {
      meet(ranks_, rank_);  // the slots of the last pass are read
      for (State& state : states_) state = {};
      ++passes_;
      std::size_t before = 0;
      Wait wait(kLimit);
      while (!is_done()) {
        for (int context = 0; context < kContexts; ++context) {
          if (!send(context) || !test(context)) return false;
          receive(context);
        }
        // A rank that only waits makes calls, too: else a lane that it has used does not come back.
        if (rank_.net().progress(rank_.contexts) != nccl::Result::kSuccess || rank_.has_error()) return false;
        if (const std::size_t now = steps(); now != before) {
          before = now;
          wait.begin_again();
        } else if (wait.is_over()) {
          ADD_FAILURE() << "rank " << rank_.number() << ": nothing goes on " << wait.report();
          return false;
        }
        wait.rest();
      }
      return true;
    }

    // After both are done.
    void check() {
      for (int context = 0; context < kContexts; ++context) {
        EXPECT_EQ(signals_[word_at(context)], passes_ * kMessages) << "wrong bytes: signals of context " << context;
        for (std::size_t message = 0; passes_ != 0 && message < kMessages; ++message) {
          for (std::size_t i = 0; i < words_of(message); ++i) {
            ASSERT_EQ(slots_[slot(context, message) + i], kUsed)
                << "wrong bytes: " << context << ' ' << message << ' ' << i;
          }
        }
      }
    }

   private:
    static std::size_t slot(int context, std::size_t message) {
      return (static_cast<std::size_t>(context) * kMessages + message) * kSlotWords;
    }
    static std::size_t word_at(int context) { return static_cast<std::size_t>(context) * 8; }

    bool is_done() const {
      for (const State& state : states_) {
        if (state.received != kMessages || state.tested != kMessages || state.get != nullptr) return false;
      }
      return true;
    }

    // What grows as long as something goes on.
    std::size_t steps() const {
      std::size_t sum = 0;
      for (const State& state : states_) sum += state.sent + state.tested + state.received;
      return sum;
    }

    bool send(int context) {
      State& state = states_[context];
      while (state.sent < kMessages && state.sent - state.tested < kUnderWay) {
        const std::uint64_t at = 8 * slot(context, state.sent);
        void*& request = state.requests[state.sent % kUnderWay];
        const nccl::Result result = rank_.net().iput_signal(
            rank_.contexts, context, {source_memory_, at}, 8 * words_of(state.sent), {memory_, at}, rank_.next(),
            {.word = {signal_memory_, 8 * word_at(context)}, .value = 1}, &request);
        if (result != nccl::Result::kSuccess) return false;
        ++state.sent;
        if (on_sent_) on_sent_(++sent_);
        if (state.sent % 5 != 0 || state.get != nullptr) continue;
        // The other rank's sources do not change.
        state.got = state.sent % kMessages;
        const std::uint64_t from = 8 * slot(context, state.got);
        if (rank_.net().iget(rank_.contexts, context, {source_memory_, from}, 8 * kSlotWords,
                             {got_memory_, 8 * kSlotWords * static_cast<std::size_t>(context)}, rank_.next(),
                             &state.get) != nccl::Result::kSuccess) {
          return false;
        }
      }
      return true;
    }

    bool test(int context) {
      State& state = states_[context];
      int done = 0;
      if (state.tested < state.sent) {
        if (rank_.net().test(rank_.coll, state.requests[state.tested % kUnderWay], &done) != nccl::Result::kSuccess) {
          return false;
        }
        state.tested += done != 0 ? 1 : 0;
      }
      if (state.get == nullptr) return true;
      if (rank_.net().test(rank_.coll, state.get, &done) != nccl::Result::kSuccess) return false;
      if (done == 0) return true;
      state.get = nullptr;
      for (std::size_t i = 0; i < kSlotWords; ++i) {
        EXPECT_EQ(got_[kSlotWords * static_cast<std::size_t>(context) + i],
                  word_of(static_cast<int>(rank_.next()), context, state.got, i))
            << "wrong bytes of a get";
      }
      return true;
    }

    void receive(int context) {
      State& state = states_[context];
      const std::uint64_t all = __atomic_load_n(&signals_[word_at(context)], __ATOMIC_ACQUIRE);
      // The other rank may have begun its next pass: that is read with this rank's next one.
      const std::uint64_t arrived = std::min(all - (passes_ - 1) * kMessages, kMessages);
      ASSERT_LE(all, (passes_ + 1) * kMessages);
      for (; state.received < arrived; ++state.received) {
        for (std::size_t i = 0; i < words_of(state.received); ++i) {
          std::uint64_t& word = slots_[slot(context, state.received) + i];
          ASSERT_EQ(word, word_of(static_cast<int>(rank_.next()), context, state.received, i)) << "wrong bytes";
          word = kUsed;
        }
      }
    }

    struct State {
      std::size_t sent = 0;
      std::size_t tested = 0;
      std::size_t received = 0;
      void* requests[kUnderWay] = {};
      void* get = nullptr;
      std::size_t got = 0;
    };

    Ranks& ranks_;
    Rank& rank_;
    const std::function<void(std::size_t)> on_sent_;
    std::size_t sent_ = 0;  // in all contexts
    Words source_{kContexts * kMessages * kSlotWords};
    Words slots_{kContexts * kMessages * kSlotWords};
    Words got_{kContexts * kSlotWords};
    Words signals_{512};
    void* source_memory_ = nullptr;
    void* memory_ = nullptr;
    void* got_memory_ = nullptr;
    void* signal_memory_ = nullptr;
    std::size_t passes_ = 0;
    State states_[kContexts];
  };

  // Puts of one word each, with one signal for all, from rank 0 to rank 1.
  class FewPuts {
   public:
    static constexpr std::size_t kPuts = 4;

    // Collective.
    explicit FewPuts(Rank& rank) : rank_(rank) {
      for (std::size_t i = 0; i < kPuts; ++i) source_[i] = 1000 + i;
      source_memory_ = rank.register_memory(source_.data(), source_.bytes());
      target_memory_ = rank.register_memory(target_.data(), target_.bytes());
      signal_memory_ = rank.register_memory(signal_.data(), signal_.bytes());
    }
    void* begin(std::size_t i) {
      return rank_.put_signal(0, {source_memory_, 8 * i}, 8, {target_memory_, 8 * i}, rank_.next(),
                              {.word = {signal_memory_, 0}, .value = 1});
    }
    void* begin_without_signal(std::size_t i) {
      return rank_.put(0, {source_memory_, 8 * i}, 8, {target_memory_, 8 * i}, rank_.next());
    }
    // After all are done.
    void check() {
      if (rank_.number() == 0) return;
      EXPECT_EQ(signal_[0], kPuts) << "wrong bytes: signals";
      for (std::size_t i = 0; i < kPuts; ++i) EXPECT_EQ(target_[i], 1000 + i) << "wrong bytes: put " << i;
    }

   private:
    Rank& rank_;
    Words source_{kPuts};
    Words target_{kPuts};
    Words signal_{8};
    void* source_memory_ = nullptr;
    void* target_memory_ = nullptr;
    void* signal_memory_ = nullptr;
  };

  static bool is_inline() {
    const char* const engine = std::getenv("SOFTVERBS_ENGINE");
    return engine != nullptr && std::string(engine) == "inline";
  }

  // Begins a fault in this process.
  static void fault(const std::string& clause) {
    // In the background: with the inline engine it begins at the next verb of this process.
    const char* const control = std::getenv("SOFTVERBS_CONTROL");
    if (control == nullptr) GTEST_SKIP() << "the tools are not built";
    const std::string command =
        std::string(control) + " fault --pid " + std::to_string(::getpid()) + " '" + clause + "' &";
    ASSERT_EQ(std::system(command.c_str()), 0);
  }

  // Returns when it has begun. The rank makes calls meanwhile: the inline engine takes faults at verbs.
  static void begin_fault(Rank& rank, const std::string& clause) {
    const char* const control = std::getenv("SOFTVERBS_CONTROL");
    if (control == nullptr) GTEST_SKIP() << "the tools are not built";
    const std::string command =
        std::string(control) + " fault --wait 60 --pid " + std::to_string(::getpid()) + " '" + clause + "'";
    std::atomic<bool> has_begun{false};
    std::thread thread([&] {
      EXPECT_EQ(std::system(command.c_str()), 0);
      has_begun = true;
    });
    for (bool works = rank.contexts != nullptr; !has_begun; std::this_thread::sleep_for(100us)) {
      if (works) works = rank.makes_progress();
    }
    thread.join();
  }

  static std::size_t lines_in(const char* text, const char* line) {
    std::size_t found = 0;
    for (const char* at = text; (at = std::strstr(at, line)) != nullptr; ++at) ++found;
    return found;
  }

  // What earlier processes have left.
  void forget() { ranks_.number(1) = 0; }

  bool both_have(const char* line) {
    return lines_in(ranks_.text(0), line) != 0 && lines_in(ranks_.text(1), line) != 0;
  }

  // Passes, until rank 0 finds that it is enough.
  void run_until(Rank& rank, Traffic& traffic, const std::function<bool()>& is_enough) {
    const Clock::time_point end = Clock::now() + kLimit;
    bool ends = false;
    while (!ends) {
      ASSERT_LT(Clock::now(), end);
      ASSERT_TRUE(traffic.run());
      if (rank.number() == 0) ranks_.number(0) = is_enough() ? 1 : 0;
      meet(rank);
      ends = ranks_.number(0) == 1;
      meet(rank);
    }
  }

  // Polls until the text of this rank's log has `line` `times` times.
  bool wait_for_line(Rank& rank, const char* line, std::size_t times = 1) {
    for (Wait wait(kLimit); !wait.is_over(); wait.rest()) {
      if (!rank.makes_progress()) return false;
      if (lines_in(ranks_.text(rank.number()), line) >= times) return true;
    }
    ADD_FAILURE() << "rank " << rank.number() << " has not logged '" << line << "' " << times << " times";
    return false;
  }

  // What both ranks do between connect and close, with `body` in place of one pass. `on_sent`: see Traffic; of rank 0.
  void run_ranks(
      const std::string& faults, const std::function<void(Rank&, Traffic&)>& body,
      const std::function<void(Rank&)>& before_contexts = [](Rank&) {},
      const std::function<void(std::size_t)>& on_sent = {}) {
    forget();
    const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
      begin(rank, faults);
      rank.connect();
      before_contexts(rank);
      rank.barrier();
      rank.create({.contexts = kContexts});
      ASSERT_NE(rank.contexts, nullptr);
      Traffic traffic(ranks_, rank, rank.number() == 0 ? on_sent : std::function<void(std::size_t)>());
      rank.barrier();
      body(rank, traffic);
      rank.barrier();
      traffic.check();
      rank.close();
      EXPECT_OK(net_->finalize(net_context_));
    });
    for (const int rank : {0, 1}) {
      EXPECT_EQ(statuses[static_cast<std::size_t>(rank)], 0) << faults << '\n' << ranks_.text(rank);
    }
  }

  // Rank 0 loses its first port, and cannot go on over another lane.
  void expect_put_fails(const std::string& faults = "link-down device=0 op=write qp=any after=20",
                        const Variable& of_rank_1 = {"SOFTVERBS_FAULTS", ""}) {
    forget();
    for (const int rank : {0, 1}) *ranks_.text(rank) = '\0';
    const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
      if (rank.number() == 1) ::setenv(of_rank_1.first, of_rank_1.second, 1);
      begin(rank, faults);
      rank.connect();
      rank.create({.contexts = kContexts});
      Traffic traffic(ranks_, rank);
      rank.barrier();
      EXPECT_FALSE(traffic.run());
      EXPECT_TRUE(rank.has_error());
      rank.barrier();
      EXPECT_OK(rank.net().close_coll(rank.coll));
      EXPECT_OK(rank.net().finalize(rank.instance));
      EXPECT_OK(net_->finalize(net_context_));
    });
    for (const int rank : {0, 1}) EXPECT_EQ(statuses[static_cast<std::size_t>(rank)], 0) << ranks_.text(rank);
  }

  void expect_all_arrives(const std::string& faults, const char* of_rank_1 = "") {
    forget();
    const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
      if (rank.number() == 1 && *of_rank_1 != '\0') ::setenv("SOFTVERBS_FAULTS", of_rank_1, 1);
      begin(rank, faults);
      rank.connect();
      rank.create({.contexts = kContexts});
      Traffic traffic(ranks_, rank);
      rank.barrier();
      EXPECT_TRUE(traffic.run());
      rank.barrier();
      // What is executed late, or twice, would be now.
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      rank.barrier();
      traffic.check();
      rank.close();
      EXPECT_OK(net_->finalize(net_context_));
    });
    for (const int rank : {0, 1}) {
      EXPECT_EQ(statuses[static_cast<std::size_t>(rank)], 0) << faults << '\n' << ranks_.text(rank);
      EXPECT_NE(std::string(ranks_.text(rank)).find("has left lane 1"), std::string::npos)
          << "rank " << rank << " has left no lane: " << faults << '\n'
          << ranks_.text(rank);
    }
  }

  int ports_[2] = {2, 2};  // of a rank
  netapi::Plugin* net_ = nullptr;
  void* net_context_ = nullptr;
  Ranks ranks_{2, 14};
};

TEST_F(RmaLanes, LinkGoesDown_AllArrivesAndEachSignalCountsOnce) {
  for (const int after : {1, 2, 7, 12, 29, 40, 61, 73}) {
    expect_all_arrives("link-down device=0 op=write,fetch_add qp=any after=" + std::to_string(after));
  }
}

// The peer has executed it: posted again it would count twice.
TEST_F(RmaLanes, AcknowledgementOfSignalIsLost_SignalCountsOnce) {
  ::setenv("VERBATIM_TIMEOUT", "10", 1);
  for (const int nth : {1, 3, 16, 40}) {
    expect_all_arrives("drop-ack op=fetch_add qp=any times=all nth=" + std::to_string(nth));
  }
}

// The peer has not executed it: it must be posted again.
TEST_F(RmaLanes, SignalIsLost_IsPostedAgain) {
  ::setenv("VERBATIM_TIMEOUT", "10", 1);
  for (const int nth : {1, 3, 16, 40}) {
    expect_all_arrives("drop-request op=fetch_add qp=any times=all nth=" + std::to_string(nth));
  }
}

TEST_F(RmaLanes, PutOrGetIsLost_IsPostedAgain) {
  ::setenv("VERBATIM_TIMEOUT", "10", 1);
  for (const char* fault : {"drop-request op=write nth=11", "drop-ack op=write nth=24", "drop-ack op=read nth=2"}) {
    expect_all_arrives(std::string(fault) + " qp=any times=all");
  }
}

// No event says it: the data path notices that nothing completes. An answer of the NIC would come after 34 s.
TEST_F(RmaLanes, PacketsVanish_LaneIsLeftAfterItsTimeout) {
  ::setenv("VERBATIM_LANE_TIMEOUT_MS", "300", 1);
  const Clock::time_point begin = Clock::now();
  expect_all_arrives("unreachable device=0 peer=1 op=write qp=any after=20");
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(30));
  // The other end may be first.
  const std::string lines = std::string(ranks_.text(0)) + ranks_.text(1);
  EXPECT_NE(lines.find("VERBATIM_LANE_TIMEOUT_MS"), std::string::npos) << lines;
}

// An application that makes no calls neither has its puts posted nor learns what has completed: its lane has not
// failed.
TEST_F(RmaLanes, NothingWasPolled_LaneIsUsed) {
  ::setenv("VERBATIM_LANE_TIMEOUT_MS", "100", 1);
  ::setenv("VERBATIM_STALL_WARN_S", "1", 1);
  forget();
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    begin(rank, "");
    rank.connect();
    rank.create({.contexts = 1});
    Words words(16);
    void* const memory = rank.register_memory(words.data(), words.bytes());
    rank.barrier();
    if (rank.number() == 0) {
      EXPECT_TRUE(rank.wait_ok(rank.put(0, {memory, 0}, 8, {memory, 64}, 1)));
      void* const put = rank.put(0, {memory, 0}, 8, {memory, 64}, 1);
      for (Wait wait(kLimit); lines_in(ranks_.text(0), "stalled for") == 0 && !wait.is_over(); wait.rest()) {
      }
      EXPECT_EQ(lines_in(ranks_.text(0), "stalled for"), 1U);
      EXPECT_TRUE(rank.wait_ok(put));
    }
    rank.barrier();
    rank.close();
    EXPECT_OK(net_->finalize(net_context_));
  });
  for (const int rank : {0, 1}) EXPECT_EQ(statuses[static_cast<std::size_t>(rank)], 0) << ranks_.text(rank);
  EXPECT_EQ(lines_in(ranks_.text(0), "VERBATIM_LANE_TIMEOUT_MS"), 0U) << ranks_.text(0);
}

TEST_F(RmaLanes, BothEndsLoseTheirPort_AllArrives) {
  expect_all_arrives("link-down device=0 op=write qp=any after=9", "link-down device=1 op=write qp=any after=13");
}

// As when a link is down for a moment while listen and create ask what the device executes: its lane is not used before
// that is known.
TEST_F(RmaLanes, DeviceCouldNotBeAskedAtFirst_AllArrives) {
  ::setenv("VERBATIM_TIMEOUT", "10", 1);
  run_ranks("drop-request op=send qp=any device=0 count=2 times=all", [&](Rank& rank, Traffic& traffic) {
    EXPECT_TRUE(traffic.run());
    EXPECT_TRUE(wait_for_line(rank, kWorksAgain));
    run_until(rank, traffic, [&] { return both_have("uses lane 1"); });
    // A signal in doubt, of which the device says whether it was executed.
    const auto failures = [&] { return lines_in(ranks_.text(1), "transport retry counter exceeded"); };
    if (rank.number() == 1) fault("drop-ack op=fetch_add qp=any times=all nth=7");
    run_until(rank, traffic, [&] { return failures() != 0; });
  });
  EXPECT_NE(std::string(ranks_.text(0)).find("softverbs0:1: its test has failed"), std::string::npos) << ranks_.text(0);
}

TEST_F(RmaLanes, FailoverIsOff_PutFails) {
  ::setenv("VERBATIM_FAILOVER", "0", 1);
  ::setenv("VERBATIM_TIMEOUT", "10", 1);
  expect_put_fails();
}

// A word of rank 1 is changed by both ranks. When rank 0 has lost its port, its signals would come over the other
// device of rank 1.
TEST_F(RmaLanes, AtomicsExcludeThoseOfOneDeviceOnly_NoSignalIsLost) {
  ::setenv("VERBATIM_TIMEOUT", "10", 1);
  ::setenv("SOFTVERBS_ATOMICS", "device", 1);
  forget();
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    begin(rank, "link-down device=0 op=fetch_add qp=any after=100");
    rank.connect();
    rank.create({.contexts = 1});
    Words word(1);
    void* const memory = rank.register_memory(word.data(), word.bytes());
    rank.barrier();
    // Until it fails, or a signal would have been lost long since.
    for (std::atomic<std::uint64_t>& done = ranks_.number(2 + rank.number()); done < 2'000; ++done) {
      void* request = nullptr;
      const RmaSignal signal{.word = {memory, 0}, .value = 1};
      if (rank.net().iput_signal(rank.contexts, 0, {}, 0, {}, 1, signal, &request) != nccl::Result::kSuccess) break;
      if (rank.wait(request) != nccl::Result::kSuccess) break;
    }
    rank.barrier();
    if (rank.number() == 1) {
      EXPECT_GE(word[0], ranks_.number(2) + ranks_.number(3)) << "wrong bytes: signals";
    }
    rank.close();
    EXPECT_OK(net_->finalize(net_context_));
  });
  for (const int rank : {0, 1}) EXPECT_EQ(statuses[static_cast<std::size_t>(rank)], 0) << ranks_.text(rank);
  const std::string lines = ranks_.text(0);
  EXPECT_NE(lines.find("this rank uses no other device, because the atomics of two devices "), std::string::npos)
      << lines;
}

TEST_F(RmaLanes, DriverAsItIs_NoOtherLaneIsUsed) {
  ::setenv("VERBATIM_TIMEOUT", "10", 1);
  ::unsetenv("SOFTVERBS_ATOMICS");
  for (const auto& [profile, line] : {std::pair("mlx5", "the atomics of two devices "),
                                      std::pair("bnxt_re", " has executed (rq_psn of ibv_query_qp is "),
                                      std::pair("irdma", "the atomics of two devices ")}) {
    SCOPED_TRACE(profile);
    ::setenv("SOFTVERBS_PROFILE", profile, 1);
    expect_put_fails();
    const std::string lines = std::string(ranks_.text(0)) + ranks_.text(1);  // either may be first
    EXPECT_NE(lines.find(line), std::string::npos) << lines;
  }
  ::unsetenv("SOFTVERBS_PROFILE");
}

// Then a signal could be lost, or count twice, when a lane fails. What each driver reports: SOFTVERBS_RQ_PSN.
TEST_F(RmaLanes, DeviceDoesNotSayWhatItHasExecuted_NoOtherLaneIsUsed) {
  ::setenv("VERBATIM_TIMEOUT", "10", 1);
  struct Case {
    const char* variable;
    const char* value;
    const char* line;
  };
  constexpr const char* kReport = " has executed (rq_psn of ibv_query_qp is ";
  const Case cases[] = {
      {"SOFTVERBS_RQ_PSN", "zero", kReport},
      {"SOFTVERBS_RQ_PSN", "cached", kReport},
      {"SOFTVERBS_RQ_PSN", "set", kReport},
      {"SOFTVERBS_RQ_PSN", "accepted", kReport},
      {"SOFTVERBS_QP_REUSE", "refused", "refuses a QP that was reset (Invalid argument): new contexts "}};
  for (const Case& one : cases) {
    SCOPED_TRACE(one.value);
    ::setenv(one.variable, one.value, 1);
    expect_put_fails();
    ::unsetenv(one.variable);
    for (const int rank : {0, 1}) EXPECT_NE(std::string(ranks_.text(rank)).find(one.line), std::string::npos);
  }
}

// The SENDs that ask each device are lost, so it is not known what it reports. A signal that is in doubt is not posted
// again, and not taken for executed: the communicator fails.
TEST_F(RmaLanes, NotKnownWhatTheDeviceReports_SignalInDoubtFails) {
  ::setenv("VERBATIM_TIMEOUT", "10", 1);
  ::setenv("SOFTVERBS_RQ_PSN", "accepted", 1);
  const std::string lost = "drop-request op=send qp=any count=all times=all";
  expect_put_fails(lost + ";drop-request op=fetch_add qp=any nth=5 times=all", {"SOFTVERBS_FAULTS", lost.c_str()});
  ::unsetenv("SOFTVERBS_RQ_PSN");
  EXPECT_NE(std::string(ranks_.text(0)).find("does not say which signals it has executed"), std::string::npos)
      << ranks_.text(0);
}

// The rank offers one port then, so there are two lanes to it all the same, from both ports of the other rank.
TEST_F(RmaLanes, DeviceOfOneRankDoesNotSayWhatItHasExecuted_SignalInDoubtFails) {
  ::setenv("VERBATIM_TIMEOUT", "10", 1);
  for (const Variable& of_rank_1 : {Variable("SOFTVERBS_RQ_PSN", "set"), Variable("SOFTVERBS_RQ_PSN", "accepted"),
                                    Variable("SOFTVERBS_QP_REUSE", "refused")}) {
    SCOPED_TRACE(of_rank_1.second);
    expect_put_fails("drop-request op=fetch_add qp=any nth=5 times=all", of_rank_1);
    EXPECT_NE(std::string(ranks_.text(0)).find("does not say which signals it has executed"), std::string::npos)
        << ranks_.text(0);
  }
}

TEST_F(RmaLanes, AtomicsOfOneRankExcludeThoseOfOneDeviceOnly_LineSaysSo) {
  ::setenv("VERBATIM_TIMEOUT", "10", 1);
  ::setenv("VERBATIM_RECONNECT_S", "1", 1);
  ::setenv("SOFTVERBS_ATOMICS", "device", 1);
  expect_put_fails("link-down device=0 op=fetch_add qp=any after=20", {"SOFTVERBS_ATOMICS", "glob"});
  // The line of the lane says so, or, where it has failed at the other end first, that of the communicator.
  EXPECT_NE(lines_in(ranks_.text(0), "; this rank uses no other device, because "), 0U) << ranks_.text(0);
}

// A fault that is not softverbs': RMA_LANES_FAULT is a shell command that gets a line of input when rank 0 has posted
// RMA_LANES_AFTER messages. It runs from the start: a process that was started then could be too late. After
// RMA_LANES_REPAIR, another command, the lane comes back.
TEST_F(RmaLanes, FaultByCommand_AllArrivesAndEachSignalCountsOnce) {
  const char* const command = std::getenv("RMA_LANES_FAULT");
  const char* const after = std::getenv("RMA_LANES_AFTER");
  const char* const repair = std::getenv("RMA_LANES_REPAIR");
  if (command == nullptr || after == nullptr) GTEST_SKIP() << "without RMA_LANES_FAULT and RMA_LANES_AFTER";
  int ended[2] = {-1, -1};  // the command inherits the end for writing: the other one reads its end
  ASSERT_EQ(::pipe(ended), 0);
  std::FILE* const input = ::popen(command, "w");
  ASSERT_NE(input, nullptr);
  ::close(ended[1]);
  const auto body = [&](Rank& rank, Traffic& traffic) {
    EXPECT_TRUE(traffic.run());
    EXPECT_TRUE(wait_for_line(rank, "has left lane 1"));
    if (repair == nullptr) return;
    meet(rank);
    if (rank.number() == 0) {
      EXPECT_EQ(std::system(repair), 0) << repair;
    }
    EXPECT_TRUE(wait_for_line(rank, kWorksAgain));
    meet(rank);
    run_until(rank, traffic, [&] { return both_have("uses lane 1"); });
  };
  const auto on_sent = [&](std::size_t sent) {
    if (sent == std::strtoul(after, nullptr, 10)) {
      std::fputc('\n', input);
      std::fflush(input);
    }
    // The last messages meet the fault, however late it is.
    char unused = 0;
    if (sent == kContexts * kMessages - 4) {
      EXPECT_EQ(::read(ended[0], &unused, 1), 0);
    }
  };
  run_ranks(
      "", body, [](Rank&) {}, on_sent);
  ::close(ended[0]);
  EXPECT_EQ(::pclose(input), 0) << command;
  for (const int rank : {0, 1}) std::printf("log of rank %d:\n%s", rank, ranks_.text(rank));
}

TEST_F(RmaLanes, LinkComesBack_FirstLaneIsUsedAgain) {
  run_ranks("link-down device=0 op=write,fetch_add qp=any after=20 for=100ms", [&](Rank& rank, Traffic& traffic) {
    EXPECT_TRUE(traffic.run());
    EXPECT_TRUE(wait_for_line(rank, "lane 1 of 2 (softverbs"));  // the failure
    EXPECT_TRUE(wait_for_line(rank, kWorksAgain));
    meet(rank);
    EXPECT_TRUE(traffic.run());
    EXPECT_TRUE(wait_for_line(rank, "uses lane 1"));
    meet(rank);
    // The second lane carries nothing any more.
    if (rank.number() == 0) fault("link-down device=2");
    EXPECT_TRUE(traffic.run());
  });
}

// No event says that the path works again: probes find it out.
TEST_F(RmaLanes, PathWorksAgain_FirstLaneIsUsedAgain) {
  ::setenv("VERBATIM_TIMEOUT", "12", 1);
  run_ranks("unreachable device=0 peer=1 op=write qp=any after=20 for=700ms", [&](Rank& rank, Traffic& traffic) {
    EXPECT_TRUE(traffic.run());
    EXPECT_TRUE(wait_for_line(rank, kWorksAgain));
    meet(rank);
    run_until(rank, traffic, [&] { return both_have("uses lane 1"); });
  });
}

// The PSNs of a lane that was connected anew begin elsewhere.
TEST_F(RmaLanes, SignalIsLostOnLaneThatCameBack_CountsOnce) {
  ::setenv("VERBATIM_TIMEOUT", "10", 1);
  for (const char* clause :
       {"drop-ack op=fetch_add qp=any times=all nth=7", "drop-request op=fetch_add qp=any times=all nth=7"}) {
    run_ranks("link-down device=0 op=write qp=any after=20 for=50ms", [&](Rank& rank, Traffic& traffic) {
      EXPECT_TRUE(traffic.run());
      EXPECT_TRUE(wait_for_line(rank, kWorksAgain));
      meet(rank);
      EXPECT_TRUE(traffic.run());
      EXPECT_TRUE(wait_for_line(rank, "uses lane 1"));
      meet(rank);
      const auto failures = [&] { return lines_in(ranks_.text(0), "transport retry counter exceeded"); };
      const std::size_t before = failures();
      if (rank.number() == 0) fault(clause);
      run_until(rank, traffic, [&] { return failures() != before; });
    });
  }
}

// Each time both lanes work again before the next failure.
TEST_F(RmaLanes, LanesFailInTurn_AllArrives) {
  run_ranks("", [&](Rank& rank, Traffic& traffic) {
    for (std::size_t round = 1; round <= 4; ++round) {
      meet(rank);
      const char* const device = round % 2 != 0 ? "0" : "2";
      if (rank.number() == 0) {
        fault(std::string("link-down device=") + device + " for=50ms");
      }
      EXPECT_TRUE(traffic.run());
      EXPECT_TRUE(wait_for_line(rank, kWorksAgain, round));
    }
    EXPECT_TRUE(traffic.run());
  });
}

// Traffic goes on all the time, and the failures come when they come.
TEST_F(RmaLanes, LinksFlapUnderTraffic_AllArrives) {
  ::setenv("VERBATIM_TIMEOUT", "14", 1);
  run_ranks(
      "link-down device=0 at=50ms for=30ms; link-down device=0 at=900ms for=30ms; "
      "link-down device=2 at=1700ms for=30ms; link-down device=0 at=1750ms for=30ms",
      [&](Rank& rank, Traffic& traffic) {
        const Clock::time_point end = Clock::now() + std::chrono::milliseconds(2600);
        bool ends = false;
        for (int pass = 0; !ends; ++pass) {
          EXPECT_TRUE(traffic.run());
          if (rank.has_error()) break;
          if (rank.number() == 0) ranks_.number(0) = Clock::now() > end ? 1 : 0;
          meet(rank);
          ends = ranks_.number(0) == 1;
          meet(rank);
        }
      });
}

// The only lane that is left is lost for a moment: the NIC's retries decide, as with one port.
TEST_F(RmaLanes, BothPortsAreDownForAMoment_AllArrives) {
  ::setenv("VERBATIM_TIMEOUT", "14", 1);
  run_ranks("link-down device=0 op=write qp=any after=9; link-down device=2 op=write qp=any after=30 for=200ms",
            [&](Rank&, Traffic& traffic) { EXPECT_TRUE(traffic.run()); });
}

// The retries of the last lane are used up before one comes back.
TEST_F(RmaLanes, NoLaneIsLeftForAMoment_AllArrives) {
  if (std::getenv("SOFTVERBS_CONTROL") == nullptr) GTEST_SKIP() << "the tools are not built";
  ::setenv("VERBATIM_TIMEOUT", "12", 1);
  run_ranks("link-down device=0 op=write qp=any after=9; link-down device=2 op=write qp=any after=30",
            [&](Rank& rank, Traffic& traffic) {
              const auto waits_for_lane = [&](int one) {
                return lines_in(ranks_.text(one), "no other lane works") != 0;
              };
              std::thread link;
              if (rank.number() == 0) {
                link = std::thread([&] {
                  for (Wait wait(kLimit); !waits_for_lane(0) && !waits_for_lane(1); wait.rest()) {
                    ASSERT_FALSE(wait.is_over()) << "no rank has used up the retries of its last lane";
                  }
                  fault("link-up device=2");
                });
              }
              EXPECT_TRUE(traffic.run());
              if (link.joinable()) link.join();
              EXPECT_TRUE(wait_for_line(rank, kWorksAgain));
            });
}

TEST_F(RmaLanes, NoLaneComesBack_FailsAfterItsTime) {
  ::setenv("VERBATIM_TIMEOUT", "12", 1);
  ::setenv("VERBATIM_RECONNECT_S", "1", 1);
  forget();
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    begin(rank, "link-down device=0 op=write qp=any after=9; link-down device=2 op=write qp=any after=30");
    rank.connect();
    rank.create({.contexts = kContexts});
    Traffic traffic(ranks_, rank);
    rank.barrier();
    const Clock::time_point begin = Clock::now();
    EXPECT_FALSE(traffic.run());
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(30));  // without the setting 60 s
    EXPECT_TRUE(rank.has_error());
    rank.barrier();
    EXPECT_OK(rank.net().close_coll(rank.coll));
    EXPECT_OK(rank.net().finalize(rank.instance));
    EXPECT_OK(net_->finalize(net_context_));
  });
  for (const int rank : {0, 1}) {
    EXPECT_EQ(statuses[static_cast<std::size_t>(rank)], 0) << ranks_.text(rank);
    EXPECT_NE(std::string(ranks_.text(rank)).find("no other one has worked"), std::string::npos) << ranks_.text(rank);
  }
}

TEST_F(RmaLanes, GidChanges_LaneIsMadeAgainWithTheNewOne) {
  const char* const link_layer = std::getenv("SOFTVERBS_LINK_LAYER");
  if (link_layer != nullptr && std::string_view(link_layer) == "ib") GTEST_SKIP() << "the address is RoCE's";
  run_ranks("", [&](Rank& rank, Traffic& traffic) {
    if (rank.number() == 0) fault("gid device=0 index=3 address=10.77.0.99 type=rocev2");
    EXPECT_TRUE(traffic.run());
    EXPECT_TRUE(wait_for_line(rank, kWorksAgain));
    meet(rank);
    EXPECT_TRUE(traffic.run());
    meet(rank);
    if (rank.number() == 0) fault("link-down device=2");
    EXPECT_TRUE(traffic.run());
  });
}

TEST_F(RmaLanes, GidCannotBeRead_LaneIsMadeAgain) {
  const char* const link_layer = std::getenv("SOFTVERBS_LINK_LAYER");
  if (link_layer != nullptr && std::string_view(link_layer) == "ib") GTEST_SKIP() << "the address is RoCE's";
  run_ranks("", [&](Rank& rank, Traffic& traffic) {
    if (rank.number() == 0) {
      begin_fault(rank, "fail verb=query_gid device=0");
      begin_fault(rank, "gid device=0 index=5 address=10.77.0.99 type=rocev2");  // says that the table has changed
    }
    EXPECT_TRUE(traffic.run());
    EXPECT_TRUE(wait_for_line(rank, kWorksAgain));
  });
}

// The ends lose different lanes, so none is left until one comes back.
TEST_F(RmaLanes, EachEndLosesAnotherLane_AllArrives) {
  if (is_inline()) {
    GTEST_SKIP() << "without a lane a rank only polls, and polls do not end a fault of the inline engine";
  }
  ::setenv("VERBATIM_TIMEOUT", "14", 1);
  run_ranks("", [&](Rank& rank, Traffic& traffic) {
    EXPECT_TRUE(traffic.run());
    meet(rank);
    fault(rank.number() == 0 ? "link-down device=0 for=300ms" : "link-down device=3 for=300ms");
    EXPECT_TRUE(traffic.run());
    EXPECT_TRUE(traffic.run());
  });
}

TEST_F(RmaLanes, PortIsDownBeforeTheContextsAreMade_OtherLaneIsUsed) {
  for (const char* device : {"0", "2"}) {
    run_ranks(
        "",
        [&](Rank& rank, Traffic& traffic) {
          EXPECT_TRUE(traffic.run());
          meet(rank);
          if (rank.number() == 0) fault("link-up");
          EXPECT_TRUE(wait_for_line(rank, kWorksAgain));
          meet(rank);
          EXPECT_TRUE(traffic.run());
          meet(rank);
          if (rank.number() == 0) fault(std::string("link-down device=") + (*device == '0' ? "2" : "0"));
          EXPECT_TRUE(traffic.run());
        },
        [&](Rank& rank) {
          if (rank.number() != 0) return;
          const std::string clause = std::string("link-down device=") + device;
          if (!is_inline()) return begin_fault(rank, clause);
          fault(clause);
          std::this_thread::sleep_for(std::chrono::milliseconds(200));  // no verb is called before those of create
        });
  }
}

// The 19th call is the first one that connects a QP to oneself, the 23rd that connects the QP for flushes.
TEST_F(RmaLanes, QpsToOneselfOverOnePortAreNotConnected_OtherLaneIsUsed) {
  for (const char* call : {"nth=19 count=2", "nth=23"}) {
    run_ranks(std::string("fail verb=modify_qp device=2 ") + call, [&](Rank& rank, Traffic& traffic) {
      EXPECT_TRUE(traffic.run());
      if (rank.number() != 0) return;
      EXPECT_TRUE(wait_for_line(rank, "to itself: lane 2 of 2 (softverbs2:1) has failed: ibv_modify_qp to RTR"));
      EXPECT_TRUE(wait_for_line(rank, "to itself: lane 2 of 2 (softverbs2:1) can be used again"));
    });
  }
}

// Lane k uses port k modulo the number of ports, at each end.
TEST_F(RmaLanes, OnePortBesideTwo_TheTwoAreLanes) {
  ports_[1] = 1;
  run_ranks("link-down device=0 op=write qp=any after=20 for=50ms", [&](Rank& rank, Traffic& traffic) {
    EXPECT_TRUE(traffic.run());
    EXPECT_TRUE(wait_for_line(rank, "has left lane 1"));
    EXPECT_TRUE(wait_for_line(rank, kWorksAgain));
    meet(rank);
    EXPECT_TRUE(traffic.run());
  });
}

TEST_F(RmaLanes, TwoOfThreeLanesFail_AllArrives) {
  ::setenv("SOFTVERBS_DEVICES", "6", 1);
  ports_[0] = ports_[1] = 3;
  run_ranks("link-down device=0 op=write qp=any after=20; link-down device=2 op=write qp=any after=60",
            [&](Rank& rank, Traffic& traffic) {
              EXPECT_TRUE(traffic.run());
              EXPECT_TRUE(traffic.run());
              EXPECT_TRUE(wait_for_line(rank, "uses lane 3"));
            });
}

// A rank that waits in a collective call answers: the other one comes to it only when its puts are done.
TEST_F(RmaLanes, LaneFailsWhilePeerRegisters_AllArrives) {
  run_ranks("", [&](Rank& rank, Traffic&) {
    Words source(8192, 7);
    Words target(8192);
    void* const from = rank.register_memory(source.data(), source.bytes());
    void* const to = rank.register_memory(target.data(), target.bytes());
    meet(rank);
    if (rank.number() == 0) {
      fault("link-down device=0 op=write qp=any after=3");
      while (lines_in(ranks_.text(0), "has left lane 1") == 0) {
        ASSERT_TRUE(rank.wait_ok(rank.put(0, {from, 0}, source.bytes(), {to, 0}, 1)));
      }
    }
    Words more(8);
    EXPECT_NE(rank.register_memory(more.data(), more.bytes()), nullptr);
    EXPECT_EQ(target[8191], rank.number() == 1 ? 7U : 0U);
  });
}

// Memory that the plugin takes for that of a GPU.
class DeviceMemory {
 public:
  static constexpr std::size_t kBytes = 4096;

  explicit DeviceMemory(Rank& rank) : descriptor_(::memfd_create("rma_lanes", MFD_CLOEXEC)) {
    EXPECT_EQ(::ftruncate(descriptor_.get(), kBytes), 0);
    data_ = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_.get(), 0);
    EXPECT_OK(rank.net().reg_mr_dmabuf(rank.coll, data_, kBytes, nccl::kPtrCuda, 0, descriptor_.get(), 0, &memory_));
  }
  ~DeviceMemory() { ::munmap(data_, kBytes); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* memory() const { return memory_; }
  void* flush(Rank& rank) const {
    void* request = nullptr;
    EXPECT_OK(rank.net().iflush(rank.contexts, 1, memory_, rank.next(), &request));
    return request;
  }

 private:
  const verbatim::UniqueFd descriptor_;
  void* data_ = nullptr;
  void* memory_ = nullptr;
};

// Nobody knows by which port the bytes came. NCCL also flushes by a put to oneself.
TEST_F(RmaLanes, FlushOfDeviceMemory_ReadsOverAllPorts) {
  if (std::getenv("SOFTVERBS_CONTROL") == nullptr) GTEST_SKIP() << "the tools are not built";
  constexpr std::chrono::seconds kDelay{2};  // no pause of a busy machine is as long
  run_ranks("", [&](Rank& rank, Traffic&) {
    if (rank.number() == 0) begin_fault(rank, "delay op=read device=2 by=2s");
    const DeviceMemory memory(rank);
    const auto flush = [&] {
      const Clock::time_point begin = Clock::now();
      EXPECT_TRUE(rank.wait_ok(memory.flush(rank)));
      return Clock::now() - begin;
    };
    const auto with_both = flush();
    if (rank.number() == 0) {
      EXPECT_GE(with_both, kDelay);
      const Clock::time_point begin = Clock::now();
      EXPECT_TRUE(rank.wait_ok(rank.put(1, {memory.memory(), 0}, 8, {memory.memory(), 8}, 0)));
      EXPECT_GE(Clock::now() - begin, kDelay);
      // Without this port there is nothing to wait for.
      fault("link-down device=2");
      EXPECT_TRUE(wait_for_line(rank, "lanes to 1 ranks are not used"));
      EXPECT_LT(flush(), kDelay);
    }
    meet(rank);
  });
}

// What a peer has written over a port that cannot be flushed would not be seen: a flush ends when nothing comes over
// it.
TEST_F(RmaLanes, OnlyTheLaneToOneselfFails_OtherRanksLeaveThePort) {
  if (std::getenv("SOFTVERBS_CONTROL") == nullptr) GTEST_SKIP() << "the tools are not built";
  ::setenv("VERBATIM_TIMEOUT", "10", 1);
  run_ranks("", [&](Rank& rank, Traffic& traffic) {
    const DeviceMemory memory(rank);
    const auto act = [&] {
      begin_fault(rank, "unreachable device=2 peer=2");
      void* const flush = memory.flush(rank);
      constexpr char kFailed[] = "to itself: lane 2 of 2 (softverbs2:1) has failed";
      Clock::time_point working;  // the last time that the lane had not failed
      int done = 0;
      for (Wait wait(kLimit); done == 0; wait.rest()) {
        ASSERT_FALSE(wait.is_over());
        if (lines_in(ranks_.text(0), kFailed) == 0) working = Clock::now();
        ASSERT_OK(rank.net().test(rank.coll, flush, &done));
      }
      EXPECT_GE(Clock::now() - working, 10ms) << "the flush has not waited until no QP of the port takes anything";
      EXPECT_EQ(lines_in(ranks_.text(0), kFailed), 1U);
      EXPECT_EQ(lines_in(ranks_.text(0), "; the lanes to other ranks over this port are left with it; lane 1"), 1U);
      for (Wait wait(kLimit); lines_in(ranks_.text(1), "lane 2 of 2 has failed at the other end") == 0; wait.rest()) {
        ASSERT_TRUE(rank.makes_progress());
        ASSERT_FALSE(wait.is_over()) << "rank 1 still uses the port";
      }
      // The other rank comes back, this one does not reach itself.
      ASSERT_TRUE(wait_for_line(rank, kWorksAgain));
      ASSERT_TRUE(rank.wait_ok(memory.flush(rank)));
      EXPECT_NE(lines_in(ranks_.text(0), "to itself: lane 2 of 2 (softverbs2:1) does not come back yet"), 0U);
      begin_fault(rank, "reachable device=2 peer=2");
      ASSERT_TRUE(wait_for_line(rank, "to itself: lane 2 of 2 (softverbs2:1) can be used again"));
      ASSERT_TRUE(rank.wait_ok(memory.flush(rank)));
    };
    if (rank.number() == 0) act();
    meet(rank);
    EXPECT_TRUE(traffic.run());
  });
}

// With it the one to oneself over this port: while the NIC repeats what is lost, both may work again.
TEST_F(RmaLanes, LinkOfLastLaneIsDownForAMoment_LaneIsKept) {
  if (std::getenv("SOFTVERBS_CONTROL") == nullptr) GTEST_SKIP() << "the tools are not built";
  ::setenv("VERBATIM_TIMEOUT", "18", 1);  // 8 tries, one a second
  run_ranks("", [&](Rank& rank, Traffic& traffic) {
    const DeviceMemory memory(rank);
    if (rank.number() == 1) begin_fault(rank, "link-down device=1");
    EXPECT_TRUE(
        wait_for_line(rank, rank.number() == 1 ? "lanes to 1 ranks are not used" : "lane 1 of 2 has failed at"));
    meet(rank);
    const auto act = [&] {
      begin_fault(rank, "link-down device=2");
      ASSERT_TRUE(wait_for_line(rank, "softverbs2:1: the link is down"));
      void* const flush = memory.flush(rank);
      begin_fault(rank, "link-up device=2");
      ASSERT_TRUE(rank.wait_ok(flush));
    };
    if (rank.number() == 0) act();
    meet(rank);
    EXPECT_TRUE(traffic.run());
    EXPECT_EQ(lines_in(ranks_.text(0), "lane 2 of 2 (softverbs2:1) has failed"), 0U);
    EXPECT_EQ(lines_in(ranks_.text(1), "lane 2 of 2 has failed at the other end"), 0U);
  });
}

// The last lane to a rank is kept while its link is down, and with it the one to oneself over this port, until a READ
// has shown that nothing comes back.
TEST_F(RmaLanes, AllLinksAreDown_FlushEndsAndLanesReturn) {
  if (std::getenv("SOFTVERBS_CONTROL") == nullptr) GTEST_SKIP() << "the tools are not built";
  ::setenv("VERBATIM_TIMEOUT", "10", 1);
  run_ranks("", [&](Rank& rank, Traffic& traffic) {
    const DeviceMemory memory(rank);
    const auto act = [&] {
      begin_fault(rank, "link-down device=2");
      ASSERT_TRUE(wait_for_line(rank, "lanes to 1 ranks are not used"));
      begin_fault(rank, "link-down device=0");
      ASSERT_TRUE(rank.wait_ok(memory.flush(rank)));
      EXPECT_EQ(lines_in(ranks_.text(0), "to itself: lane 1 of 2 (softverbs0:1) has failed"), 1U);
      begin_fault(rank, "link-up device=0; link-up device=2");
      ASSERT_TRUE(wait_for_line(rank, kWorksAgain));
      ASSERT_TRUE(rank.wait_ok(memory.flush(rank)));
    };
    if (rank.number() == 0) act();
    meet(rank);
    EXPECT_TRUE(traffic.run());
  });
}

// It is no failure of a lane.
TEST_F(RmaLanes, PeerHasDeregistered_CommunicatorFailsWithTheCause) {
  forget();
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    begin(rank, "");
    rank.connect();
    rank.create({.contexts = kContexts});
    Words words(512, 7);
    void* const memory = rank.register_memory(words.data(), words.bytes());
    if (rank.number() == 1) {
      EXPECT_OK(rank.net().dereg_mr(rank.coll, memory));
    }
    rank.barrier();
    if (rank.number() == 0) {
      EXPECT_NE(rank.wait(rank.put(0, {memory, 0}, 64, {memory, 0}, 1)), nccl::Result::kSuccess);
    }
    for (Wait wait(kLimit); !rank.has_error() && !wait.is_over();) wait.rest();
    EXPECT_TRUE(rank.has_error());
    rank.barrier();
    EXPECT_OK(rank.net().close_coll(rank.coll));
    EXPECT_OK(rank.net().finalize(rank.instance));
    EXPECT_OK(net_->finalize(net_context_));
  });
  for (const int rank : {0, 1}) {
    EXPECT_EQ(statuses[static_cast<std::size_t>(rank)], 0) << ranks_.text(rank);
    EXPECT_NE(std::string(ranks_.text(rank)).find("remote access error"), std::string::npos) << ranks_.text(rank);
    EXPECT_EQ(std::string(ranks_.text(rank)).find("cable"), std::string::npos) << ranks_.text(rank);
  }
}

// The second lane is used twice, and the first one in between. The packets of the first use are not taken for those of
// the second one.
TEST_F(RmaLanes, LaneIsLeftWhileItWorksAndFailsAtItsSecondUse_NothingIsLost) {
  if (std::getenv("SOFTVERBS_CONTROL") == nullptr) GTEST_SKIP() << "the tools are not built";
  ::setenv("VERBATIM_TIMEOUT", "10", 1);
  run_ranks("", [&](Rank& rank, Traffic&) {
    FewPuts puts(rank);
    meet(rank);
    const auto act = [&] {
      begin_fault(rank, "link-down device=0");
      ASSERT_TRUE(wait_for_line(rank, ") has left lane 1", 1));  // not the lane "to itself"
      ASSERT_TRUE(rank.wait_ok(puts.begin(0)));
      begin_fault(rank, "link-up device=0");
      ASSERT_TRUE(wait_for_line(rank, kWorksAgain, 1));
      ASSERT_TRUE(rank.wait_ok(puts.begin(1)));
      ASSERT_EQ(lines_in(ranks_.text(0), "uses lane 1"), 1U) << "it has not gone back";
      begin_fault(rank, "link-down device=0");
      ASSERT_TRUE(wait_for_line(rank, ") has left lane 1", 2));
      // The first WRITE, with all of its repetitions.
      begin_fault(rank, "drop-request op=write device=2 qp=any times=all");
      void* const lost = puts.begin(2);
      ASSERT_TRUE(wait_for_line(rank, ") has failed: transport retry counter exceeded", 1));
      begin_fault(rank, "link-up device=0");
      ASSERT_TRUE(rank.wait_ok(lost));
      ASSERT_TRUE(rank.wait_ok(puts.begin(3)));
    };
    if (rank.number() == 0) act();
    meet(rank);
    puts.check();
  });
}

// The device of the peer may still hold bytes of the put: the signal behind it would say that they have arrived.
TEST_F(RmaLanes, LaneFailsBetweenPutAndSignal_SignalWaitsForLateBytes) {
  if (std::getenv("SOFTVERBS_CONTROL") == nullptr) GTEST_SKIP() << "the tools are not built";
  run_ranks("", [&](Rank& rank, Traffic&) {
    FewPuts puts(rank);
    meet(rank);
    const auto act = [&] {
      ASSERT_TRUE(rank.wait_ok(puts.begin_without_signal(0)));
      fault("link-down device=0");
      Clock::time_point working = Clock::now();  // the last time that the lane had not failed
      for (Wait wait(kLimit); lines_in(ranks_.text(0), "lanes to 1 ranks are not used") == 0; wait.rest()) {
        ASSERT_FALSE(wait.is_over());
        working = Clock::now();
        ASSERT_TRUE(rank.makes_progress());
      }
      ASSERT_TRUE(rank.wait_ok(puts.begin(0)));
      EXPECT_GE(Clock::now() - working, 10ms);
      for (std::size_t i = 1; i < FewPuts::kPuts; ++i) ASSERT_TRUE(rank.wait_ok(puts.begin(i)));
    };
    if (rank.number() == 0) act();
    meet(rank);
    puts.check();
  });
}

// A network namespace of its own, with two interfaces. False: the system forbids it.
bool enter_network() {
  const std::string map = "0 " + std::to_string(::geteuid()) + " 1";
  if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return false;
  std::ofstream("/proc/self/setgroups") << "deny";
  std::ofstream("/proc/self/uid_map") << map;
  return std::system(
             "set -e; ip link set lo up; for i in 0 1; do ip link add rail$i type veth peer name end$i; "
             "ip link set end$i up; ip addr add 10.9.$i.1/24 dev rail$i; ip link set rail$i up; "
             // Only then the plugin finds it.
             "until ip link show rail$i | grep -q 'state UP'; do sleep 0.01; done; done") == 0;
}

class RmaInterfaces : public RmaLanes {
 protected:
  void SetUp() override {
    static const bool entered = enter_network();  // all cases use the same
    if (!entered) GTEST_SKIP() << "no permission to make a network namespace, or no program ip";
    EXPECT_EQ(std::system("for i in 0 1; do ip addr replace 10.9.$i.1/24 dev rail$i; done"), 0);
    ::setenv("VERBATIM_SOCKET_IFNAME", "=rail0,rail1", 1);
    ::setenv("VERBATIM_KEEPALIVE_S", "6", 1);
  }
};

// The first interface is lost together with the port: the ranks agree over the other one, long before the kernel gives
// up the connection of the first one.
TEST_F(RmaInterfaces, FirstInterfaceIsLost_LaneIsLeftAndComesBack) {
  run_ranks("", [&](Rank& rank, Traffic& traffic) {
    EXPECT_TRUE(traffic.run());
    meet(rank);
    if (rank.number() == 0) {
      EXPECT_EQ(std::system("ip addr del 10.9.0.1/24 dev rail0"), 0);
      fault("link-down device=0");
      EXPECT_TRUE(wait_for_line(rank, "are not used until"));
    }
    meet(rank);
    EXPECT_TRUE(traffic.run());
    EXPECT_TRUE(wait_for_line(rank, "has left lane 1"));
    EXPECT_TRUE(wait_for_line(rank, "is used in place of one that "));
    meet(rank);
    const char* const moved = "is used in place of one that did not answer";
    EXPECT_GE(lines_in(ranks_.text(0), moved) + lines_in(ranks_.text(1), moved), 1U);
    if (rank.number() == 0) fault("link-up device=0");
    EXPECT_TRUE(wait_for_line(rank, kWorksAgain));
    Words words(8);
    EXPECT_NE(rank.register_memory(words.data(), words.bytes()), nullptr);
    EXPECT_TRUE(traffic.run());
  });
}

// Whether a TCP connection of this network has not ended.
bool has_connection() {
  std::ifstream table("/proc/self/net/tcp");
  for (std::string line; std::getline(table, line);) {
    if (line.find(" 01 ") != std::string::npos) return true;
  }
  return false;
}

// Both interfaces are lost until the kernel has given up all TCP connections.
TEST_F(RmaInterfaces, NetworkIsCutAndComesBack_CallsGoOn) {
  ::setenv("VERBATIM_KEEPALIVE_S", "1", 1);
  run_ranks("", [&](Rank& rank, Traffic& traffic) {
    EXPECT_TRUE(traffic.run());
    meet(rank);
    if (rank.number() == 0) {
      EXPECT_EQ(std::system("for i in 0 1; do ip addr del 10.9.$i.1/24 dev rail$i; done"), 0);
    }
    meet(rank);
    Words words(8);
    std::thread back([&] {
      while (rank.number() == 0 && has_connection()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (rank.number() != 0) return;
      EXPECT_EQ(std::system("for i in 0 1; do ip addr add 10.9.$i.1/24 dev rail$i; done"), 0);
    });
    EXPECT_NE(rank.register_memory(words.data(), words.bytes()), nullptr);
    back.join();
    EXPECT_TRUE(wait_for_line(rank, "is used in place of one that ended "));
    EXPECT_TRUE(traffic.run());
  });
}

}  // namespace
}  // namespace rma_test
