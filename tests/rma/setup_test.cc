// Set-up of 2 to 64 ranks.
//: program rma_setup sources=ranks.cc link=netapi,base,threads,gtest
//: all timeout=240 SOFTVERBS_MAX_QP=16384 SOFTVERBS_MAX_CQ=16384 VERBATIM_MAX_RECVS=1
//: test rma-setup filter=-*Benchmark*
//: benchmark rma-setup-time filter=RmaSetUpBenchmark.*
//: benchmark messages-setup-time filter=MessagesSetUpBenchmark.*

// How the set-up of RMA grows with the number of ranks: TCP connections and QPs of a rank and, as a benchmark, time,
// processor time and memory. Beside it a set-up that makes one connection after the other, with a barrier behind each,
// as NCCL's own transport does (src/transport/net_ib/gin.cc of 2.30.7): with the connections for messages of the same
// plugin. Another benchmark makes all of a rank's connections for messages at once. All ranks are threads of this
// process, which computes X25519 once for all of them: ranks in processes of their own need some 40 us more for each
// other one.
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "netapi/plugin.h"
#include "ranks.h"
#include "support/benchmark.h"

namespace rma_test {
namespace {

using Clock = std::chrono::steady_clock;

double processor_ms() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

// Those whose target begins so.
std::size_t open_descriptors(const char* target) {
  std::size_t descriptors = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    descriptors += std::filesystem::read_symlink(entry.path(), error).string().starts_with(target) ? 1U : 0U;
  }
  return descriptors;
}

std::size_t open_sockets() {
  return open_descriptors("socket:");
}

std::size_t heap_bytes() {
  const struct mallinfo2 info = ::mallinfo2();
  return info.uordblks + info.hblkhd;
}

// Of one set-up. The times are those of the slowest rank, the processor time is the mean.
struct SetUpCost {
  double elapsed_ms = 0;
  double processor_ms = 0;
  double connections = 0;  // these four: of a rank
  double descriptors = 0;
  double qps = 0;
  double kib = 0;
};

struct RankTimes {
  double elapsed_ms = 0;
  double processor_ms = 0;
};

void add_times(SetUpCost& result, const std::vector<RankTimes>& times) {
  for (const RankTimes& rank : times) {
    result.elapsed_ms = std::max(result.elapsed_ms, rank.elapsed_ms);
    result.processor_ms += rank.processor_ms / static_cast<double>(times.size());
  }
}

class Stopwatch {
 public:
  RankTimes read() const {
    return {std::chrono::duration<double, std::milli>(Clock::now() - begin_).count(), processor_ms() - processor_};
  }

 private:
  Clock::time_point begin_ = Clock::now();
  double processor_ = processor_ms();
};

// `Rank::connect` waits for all ranks between listen and connect.
SetUpCost set_up_rma(int ranks, int contexts) {
  const std::string dump =
      (std::filesystem::temp_directory_path() / ("rma-setup-" + std::to_string(::getpid()))).string();
  ::setenv("VERBATIM_QP_DUMP", dump.c_str(), 1);
  SetUpCost result;
  std::vector<RankTimes> times(static_cast<std::size_t>(ranks));
  std::size_t heap = 0;
  std::size_t sockets = 0;
  Ranks all(ranks, 0);
  all.run([&](Rank& rank) {
    if (rank.number() == 0) {
      heap = heap_bytes();
      sockets = open_sockets();
    }
    rank.barrier();
    const Stopwatch watch;
    rank.connect();
    ASSERT_NE(rank.coll, nullptr);
    rank.create({.contexts = contexts});
    times[static_cast<std::size_t>(rank.number())] = watch.read();
    rank.barrier();
    if (rank.number() == 0) {
      // Without the socket at which the process listens while it has connections.
      result.connections = static_cast<double>(open_sockets() - sockets - 1) / ranks;
      result.kib = static_cast<double>(heap_bytes() - heap) / 1024 / ranks;
    }
    rank.close();
  });
  ::unsetenv("VERBATIM_QP_DUMP");
  std::ifstream lines(dump);
  std::size_t qps = 0;
  for (std::string line; std::getline(lines, line);) ++qps;
  result.qps = static_cast<double>(qps) / ranks;
  std::filesystem::remove(dump);
  add_times(result, times);
  return result;
}

// One rank of the other set-up.
class OneByOne {
 public:
  OneByOne(netapi::Plugin& net, Rank& rank, int ranks) : net_(net), rank_(rank), ranks_(ranks) {
    EXPECT_OK(net_.init(static_cast<std::uint64_t>(rank.number()), {}, &context_));
    EXPECT_OK(net_.listen(context_, 0, rank.handle(rank.number()), &listen_));
    rank.barrier();
  }
  ~OneByOne() {
    for (void* const memory : {memory_[0], memory_[1]}) {
      if (memory != nullptr) {
        EXPECT_OK(net_.dereg_mr(memory == memory_[0] ? ring_.first : ring_.second, memory));
      }
    }
    for (const auto& [send, recv] : comms_) {
      EXPECT_OK(net_.close_send(send));
      EXPECT_OK(net_.close_recv(recv));
    }
    EXPECT_OK(net_.close_listen(listen_));
    rank_.barrier();
    EXPECT_OK(net_.finalize(context_));
  }

  void run(int contexts) {
    ring_ = connect(1);
    EXPECT_OK(net_.reg_mr(ring_.first, &word_, sizeof word_, nccl::kPtrHost, &memory_[0]));
    EXPECT_OK(net_.reg_mr(ring_.second, &received_, sizeof received_, nccl::kPtrHost, &memory_[1]));
    for (int context = 0; context < contexts; ++context) {
      for (int distance = 0; distance < ranks_; ++distance) {
        connect(distance);
        for (int step = 1; step < ranks_; ++step) pass_on();
      }
    }
  }

 private:
  using Comms = std::pair<void*, void*>;

  // To the rank at this distance, and from the one that is as far on the other side.
  Comms connect(int distance) {
    char handle[nccl::kNetHandleMaxBytes];
    std::memcpy(handle, rank_.handle(static_cast<int>(rank_.next(distance))), sizeof handle);
    Comms comms{nullptr, nullptr};
    while (comms.first == nullptr || comms.second == nullptr) {
      if (comms.first == nullptr && net_.connect(context_, 0, handle, &comms.first) != nccl::Result::kSuccess) {
        ADD_FAILURE() << "connect failed";
        return comms;
      }
      if (comms.second == nullptr && net_.accept(listen_, &comms.second) != nccl::Result::kSuccess) {
        ADD_FAILURE() << "accept failed";
        return comms;
      }
      std::this_thread::yield();
    }
    comms_.push_back(comms);
    return comms;
  }

  // One step of the barrier around the ring.
  void pass_on() {
    void* data = &received_;
    std::size_t size = sizeof received_;
    int tag = 0;
    void* receive = nullptr;
    EXPECT_OK(net_.irecv(ring_.second, 1, &data, &size, &tag, &memory_[1], &receive));
    void* send = nullptr;
    while (send == nullptr) {
      EXPECT_OK(net_.isend(ring_.first, &word_, sizeof word_, 0, memory_[0], &send));
      if (send == nullptr) std::this_thread::yield();
    }
    for (void* const request : {send, receive}) {
      int sizes[8] = {};
      for (int done = 0; done == 0;) {
        EXPECT_OK(net_.test(request, &done, sizes));
        if (done == 0) std::this_thread::yield();
      }
    }
  }

  netapi::Plugin& net_;
  Rank& rank_;
  const int ranks_;
  void* context_ = nullptr;
  void* listen_ = nullptr;
  std::vector<Comms> comms_;
  Comms ring_;
  std::uint64_t word_ = 1;
  std::uint64_t received_ = 0;
  void* memory_[2] = {nullptr, nullptr};
};

SetUpCost set_up_one_by_one(netapi::Plugin& net, int ranks, int contexts) {
  SetUpCost result;
  std::vector<RankTimes> times(static_cast<std::size_t>(ranks));
  std::size_t sockets = 0;
  Ranks all(ranks, 0);
  all.run([&](Rank& rank) {
    if (rank.number() == 0) sockets = open_sockets();
    rank.barrier();
    OneByOne set_up(net, rank, ranks);
    const Stopwatch watch;
    set_up.run(contexts);
    times[static_cast<std::size_t>(rank.number())] = watch.read();
    rank.barrier();
    if (rank.number() == 0) result.connections = static_cast<double>(open_sockets() - sockets) / ranks;
    rank.barrier();
  });
  add_times(result, times);
  return result;
}

// Each rank makes so many connections to each other rank, all at once, and has as many from it.
class AllAtOnce {
 public:
  AllAtOnce(netapi::Plugin& net, Rank& rank, int ranks, int connections) : net_(net) {
    EXPECT_OK(net_.init(static_cast<std::uint64_t>(rank.number()), {}, &context_));
    EXPECT_OK(net_.listen(context_, 0, rank.handle(rank.number()), &listen_));
    rank.barrier();
    for (int distance = 1; distance < ranks; ++distance) {
      for (int number = 0; number < connections; ++number) {
        sends_.emplace_back();
        std::memcpy(sends_.back().handle, rank.handle(static_cast<int>(rank.next(distance))), nccl::kNetHandleMaxBytes);
      }
    }
    receives_.resize(sends_.size());
  }
  ~AllAtOnce() {
    for (const Send& send : sends_) {
      EXPECT_OK(net_.close_send(send.comm));
    }
    for (void* const comm : receives_) {
      EXPECT_OK(net_.close_recv(comm));
    }
    EXPECT_OK(net_.close_listen(listen_));
    EXPECT_OK(net_.finalize(context_));
  }

  void run() {
    std::size_t accepted = 0;
    std::size_t connected = 0;
    while (connected + accepted < 2 * sends_.size() && !::testing::Test::HasFailure()) {
      const std::size_t before = connected + accepted;
      for (Send& send : sends_) {
        if (send.comm != nullptr) continue;
        EXPECT_OK(net_.connect(context_, 0, send.handle, &send.comm));
        connected += send.comm != nullptr ? 1U : 0U;
      }
      if (accepted != receives_.size()) {
        EXPECT_OK(net_.accept(listen_, &receives_[accepted]));
        accepted += receives_[accepted] != nullptr ? 1U : 0U;
      }
      if (connected + accepted == before) std::this_thread::yield();
    }
  }

 private:
  struct Send {
    char handle[nccl::kNetHandleMaxBytes];
    void* comm = nullptr;
  };

  netapi::Plugin& net_;
  void* context_ = nullptr;
  void* listen_ = nullptr;
  std::vector<Send> sends_;
  std::vector<void*> receives_;
};

SetUpCost set_up_at_once(netapi::Plugin& net, int ranks, int connections) {
  SetUpCost result;
  std::vector<RankTimes> times(static_cast<std::size_t>(ranks));
  std::size_t heap = 0;
  std::size_t sockets = 0;
  std::size_t descriptors = 0;
  Ranks all(ranks, 0);
  all.run([&](Rank& rank) {
    if (rank.number() == 0) {
      heap = heap_bytes();
      sockets = open_sockets();
      descriptors = open_descriptors("");
    }
    rank.barrier();
    AllAtOnce set_up(net, rank, ranks, connections);
    const Stopwatch watch;
    set_up.run();
    times[static_cast<std::size_t>(rank.number())] = watch.read();
    rank.barrier();
    if (rank.number() == 0) {
      result.connections = static_cast<double>(open_sockets() - sockets) / ranks;
      result.descriptors = static_cast<double>(open_descriptors("") - descriptors) / ranks;
      result.kib = static_cast<double>(heap_bytes() - heap) / 1024 / ranks;
    }
    rank.barrier();
  });
  add_times(result, times);
  return result;
}

// The exponent of the power of the number of ranks with which the values grow: the slope of the logarithms.
double growth(const std::vector<double>& ranks, const std::vector<double>& values) {
  double x = 0;
  double y = 0;
  double xx = 0;
  double xy = 0;
  const auto count = static_cast<double>(ranks.size());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const double log_ranks = std::log(ranks[i]);
    const double log_value = std::log(values[i]);
    x += log_ranks;
    y += log_value;
    xx += log_ranks * log_ranks;
    xy += log_ranks * log_value;
  }
  return (count * xy - x * y) / (count * xx - x * x);
}

constexpr int kMostRanks = 64;

class RmaSetUp : public ::testing::Test {
 protected:
  void SetUp() override {
    opened_ = netapi::open_plugin(std::getenv("PLUGIN"));
    ASSERT_NE(opened_.plugin, nullptr) << opened_.error;
    ASSERT_OK(opened_.plugin->init(4711, {}, &kept_open_));
  }
  void TearDown() override {
    if (opened_.plugin != nullptr) {
      EXPECT_OK(opened_.plugin->finalize(kept_open_));
    }
  }

  netapi::Opened opened_;

 private:
  void* kept_open_ = nullptr;  // so that no set-up opens the devices
};

TEST_F(RmaSetUp, RankHasAConnectionAndQpsForEachOther) {
  for (const int contexts : {1, 4}) {
    for (int count = 2; count <= kMostRanks; count *= 2) {
      SCOPED_TRACE(std::to_string(count) + " ranks, " + std::to_string(contexts) + " contexts");
      const SetUpCost rma = set_up_rma(count, contexts);
      // A connection to each other rank, and its end here.
      EXPECT_EQ(rma.connections, count - 1);
      EXPECT_EQ(rma.qps, contexts * count);
    }
  }
}

class RmaSetUpBenchmark : public RmaSetUp {};
class MessagesSetUpBenchmark : public RmaSetUp {};

TEST_F(RmaSetUpBenchmark, Ranks) {
  constexpr int kRounds = 5;
  constexpr int kMostComms = 8192;  // of a process over softverbs
  std::printf(
      "# ranks contexts | ms a set-up, ms of processor, TCP, QPs, KiB a rank | one by one: ms, ms of processor, TCP\n");
  for (const int contexts : {1, 4}) {
    const std::string with_contexts = contexts == 1 ? "one context" : "four contexts";
    std::vector<double> exponents;
    std::vector<double> of_most_ranks;
    for (int round = 0; round < kRounds; ++round) {
      std::vector<double> ranks;
      std::vector<double> processor;
      for (int count = 2; count <= kMostRanks; count *= 2) {
        const SetUpCost rma = set_up_rma(count, contexts);
        if (count >= 4) {
          ranks.push_back(count);
          processor.push_back(rma.processor_ms);
        }
        if (count == kMostRanks) of_most_ranks.push_back(rma.elapsed_ms);
        if (round != 0) continue;
        std::printf("%7d %8d | %8.1f %8.2f %4.0f %5.0f %8.0f |", count, contexts, rma.elapsed_ms, rma.processor_ms,
                    rma.connections, rma.qps, rma.kib);
        // Two for each connection, and for the ring of the barrier.
        if (2 * (contexts * count + 1) * count <= kMostComms) {
          const SetUpCost other = set_up_one_by_one(*opened_.plugin, count, contexts);
          std::printf(" %9.1f %8.1f %6.0f", other.elapsed_ms, other.processor_ms, other.connections);
        }
        std::printf("\n");
      }
      exponents.push_back(growth(ranks, processor));
    }
    verbatim::test::print_benchmark("set-up of " + std::to_string(kMostRanks) + " ranks, " + with_contexts, "ms",
                                    of_most_ranks);
    // 1: it is proportional to the ranks, 2: a rank does something for each pair of them.
    verbatim::test::print_benchmark("processor time of a rank grows with the ranks, " + with_contexts, "(exponent)",
                                    exponents);
  }
}

TEST_F(MessagesSetUpBenchmark, ConnectionsMadeAtOnce) {
  constexpr int kRounds = 3;
  constexpr int kMostConnections = 16'000;
  std::printf("# ranks connections | ms, ms of processor, sockets, descriptors, KiB a rank\n");
  for (const int connections : {1, 8}) {
    for (int count = 2; count <= kMostRanks; count *= 2) {
      if (2 * connections * (count - 1) * count > kMostConnections) continue;
      std::vector<double> processor;
      SetUpCost cost;
      for (int round = 0; round < kRounds; ++round) {
        cost = set_up_at_once(*opened_.plugin, count, connections);
        processor.push_back(cost.processor_ms);
      }
      std::printf("%7d %11d | %8.1f %8.2f %5.0f %5.0f %8.0f\n", count, connections, cost.elapsed_ms, cost.processor_ms,
                  cost.connections, cost.descriptors, cost.kib);
      verbatim::test::print_benchmark("processor time of a rank, " + std::to_string(count) + " ranks with " +
                                          std::to_string(connections) + " connections each way",
                                      "ms", processor);
    }
  }
}

}  // namespace
}  // namespace rma_test
