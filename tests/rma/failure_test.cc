// Processes must not inherit an open device, so these are tests of their own.
//: test rma-failure filter=*RmaFailure*
//: test rma-failure-{driver} driver=mlx5,bnxt_re,irdma full filter=*RmaFailure* SOFTVERBS_PROFILE={driver}

// Ranks that die, fail or close early: what the other ranks see. TCP connections that are reset: nothing fails. Each
// rank is a process.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>

#include "ranks.h"

namespace rma_test {
namespace {

using Clock = std::chrono::steady_clock;
// Much shorter than the NIC needs to find out (34 s with the default settings): the end of the connection says it.
constexpr std::chrono::seconds kLimit{15};

// Ends all TCP connections of this process with an error at both ends. Returns how many there were.
int reset_connections() {
  int resets = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    sockaddr_storage peer{};
    socklen_t bytes = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &bytes) != 0 || peer.ss_family != AF_INET) continue;
    const sockaddr none{.sa_family = AF_UNSPEC, .sa_data = {}};
    // Not by libc's function: ThreadSanitizer would take the descriptor for a new one.
    resets += ::syscall(SYS_connect, fd, &none, sizeof none) == 0 ? 1 : 0;
  }
  return resets;
}

// As in tcp(7); the header with the counts does not have it.
constexpr std::uint8_t kEstablished = 1;

// Of each TCP connection of this process.
std::vector<std::uint64_t> bytes_sent() {
  std::vector<std::uint64_t> sent;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    tcp_info info{};
    socklen_t bytes = sizeof info;
    const int fd = std::stoi(entry.path().filename());
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 && info.tcpi_state == kEstablished)
      sent.push_back(info.tcpi_bytes_sent);
  }
  return sent;
}

bool all_have_sent_more(const std::vector<std::uint64_t>& before) {
  const std::vector<std::uint64_t> now = bytes_sent();
  return std::equal(now.begin(), now.end(), before.begin(), before.end(), std::greater<>());
}

class RmaFailure : public ::testing::TestWithParam<int> {
 protected:
  // Each rank writes its name and kills itself, or not; the others return.
  static bool has_error_soon(Rank& rank) {
    const Clock::time_point end = Clock::now() + kLimit;
    while (!rank.has_error()) {
      if (Clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  // Success: none has failed within kLimit.
  static nccl::Result put_until_it_fails(Rank& rank, int context, void* memory, std::uint32_t peer) {
    const Clock::time_point end = Clock::now() + kLimit;
    nccl::Result result = nccl::Result::kSuccess;
    while (result == nccl::Result::kSuccess && Clock::now() < end) {
      void* request = nullptr;
      result = rank.net().iput(rank.contexts, context, {memory, 0}, 8, {memory, 8}, peer, &request);
      if (result == nccl::Result::kSuccess) result = rank.wait(request);
    }
    return result;
  }

  Ranks ranks_{3, GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Rma, RmaFailure, ::testing::Values(13, 14),
                         [](const auto& param) { return "v" + std::to_string(param.param); });

TEST_P(RmaFailure, KilledRank_FailsPutsTestsAndLastErrorOfAllOthers) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.keep_warnings();
    rank.connect();
    rank.create({.contexts = 2});
    Words words(512);
    void* const memory = rank.register_memory(words.data(), words.bytes());
    EXPECT_TRUE(rank.wait_ok(rank.put(0, {memory, 0}, 8, {memory, 8}, rank.next())));
    EXPECT_FALSE(rank.has_error());
    rank.barrier();
    if (rank.number() == 2) ::kill(::getpid(), SIGKILL);
    // Rank 0 puts to the dead rank until that fails, rank 1 only asks.
    if (rank.number() == 0) {
      EXPECT_EQ(put_until_it_fails(rank, 1, memory, 2), nccl::Result::kRemoteError);
    }
    EXPECT_TRUE(has_error_soon(rank));
    void* request = &request;
    EXPECT_EQ(rank.net().iput(rank.contexts, 0, {memory, 0}, 8, {memory, 8}, 1, &request), nccl::Result::kRemoteError);
    EXPECT_EQ(request, nullptr);
    EXPECT_OK(rank.net().destroy_context(rank.contexts));
    EXPECT_OK(rank.net().close_coll(rank.coll));
    EXPECT_OK(rank.net().finalize(rank.instance));
  });
  EXPECT_EQ(statuses[0], 0);
  EXPECT_EQ(statuses[1], 0);
  EXPECT_TRUE(WIFSIGNALED(statuses[2]));
  for (const int rank : {0, 1}) {
    const std::string text = ranks_.text(rank);
    EXPECT_NE(text.find("rank 2 on "), std::string::npos) << text;
    EXPECT_NE(text.find(". Next: "), std::string::npos) << text;
  }
}

// Rank 1 deregisters memory into which rank 0 puts: the NIC refuses it.
TEST_P(RmaFailure, RefusedPut_FailsAtAllRanksAndTheLineNamesRankContextAndPath) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.keep_warnings();
    rank.connect();
    rank.create({.contexts = 2});
    Words words(512);
    void* const memory = rank.register_memory(words.data(), words.bytes());
    rank.barrier();
    if (rank.number() == 1) {
      EXPECT_OK(rank.net().dereg_mr(rank.coll, memory));
    }
    rank.barrier();
    if (rank.number() == 0) {
      EXPECT_EQ(rank.wait(rank.put(1, {memory, 0}, 64, {memory, 64}, 1)), nccl::Result::kRemoteError);
    }
    EXPECT_TRUE(has_error_soon(rank));
    rank.barrier();
    EXPECT_OK(rank.net().close_coll(rank.coll));
    EXPECT_OK(rank.net().finalize(rank.instance));
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
  const std::string own = ranks_.text(0);
  for (const char* part : {"rank 0 to rank 1 on ", "RMA context 1", "putting 64 bytes", "IBV_WC_REM_ACCESS_ERR",
                           ". Next: ", "softverbs0", "softverbs1", " QP "}) {
    EXPECT_NE(own.find(part), std::string::npos) << part << " is missing in: " << own;
  }
  const std::string other = ranks_.text(2);
  EXPECT_NE(other.find("has failed at rank 0 on "), std::string::npos) << other;
}

TEST_P(RmaFailure, RankThatDiesBeforeItConnects_FailsConnectOfTheOthers) {
  ::setenv("VERBATIM_CONNECT_TIMEOUT_S", "2", 1);
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.keep_warnings();
    int devices = 0;
    EXPECT_OK(rank.net().init(1, &rank.instance));
    EXPECT_OK(rank.net().devices(&devices));
    EXPECT_OK(rank.net().listen(rank.instance, 0, rank.handle(rank.number()), &rank.listen));
    rank.barrier();
    if (rank.number() == 2) ::_exit(0);
    void* handles[] = {rank.handle(0), rank.handle(1), rank.handle(2)};
    EXPECT_EQ(rank.net().connect(nullptr, handles, 3, rank.number(), rank.listen, &rank.coll),
              nccl::Result::kRemoteError);
    EXPECT_EQ(rank.coll, nullptr);
    EXPECT_OK(rank.net().finalize(rank.instance));
  });
  ::unsetenv("VERBATIM_CONNECT_TIMEOUT_S");
  for (const int status : statuses) EXPECT_EQ(status, 0);
  EXPECT_NE(std::string(ranks_.text(0)).find("rank"), std::string::npos);
}

// The ranks that wait for it give up, and the one that makes no call learns why nothing comes from them any more.
TEST_P(RmaFailure, RegistrationThatOneRankDoesNotMake_FailsAtAllRanks) {
  if (GetParam() != 14) GTEST_SKIP() << "the tables share this call";
  ::setenv("VERBATIM_CONNECT_TIMEOUT_S", "6", 1);  // of connect and create, too
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.keep_warnings();
    rank.connect();
    rank.create({});
    Words words(512);
    void* memory = nullptr;
    if (rank.number() != 2) {
      EXPECT_EQ(rank.net().reg_mr(rank.coll, words.data(), words.bytes(), nccl::kPtrHost, 0, &memory),
                nccl::Result::kRemoteError);
    }
    EXPECT_TRUE(has_error_soon(rank));
    EXPECT_EQ(rank.net().reg_mr(rank.coll, words.data(), words.bytes(), nccl::kPtrHost, 0, &memory),
              nccl::Result::kRemoteError);
    rank.barrier();
    EXPECT_OK(rank.net().close_coll(rank.coll));
    EXPECT_OK(rank.net().finalize(rank.instance));
  });
  ::unsetenv("VERBATIM_CONNECT_TIMEOUT_S");
  for (const int status : statuses) EXPECT_EQ(status, 0);
  for (const int rank : {0, 1, 2}) {
    const std::string text = ranks_.text(rank);
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
    EXPECT_NE(text.find(". Next: "), std::string::npos) << text;
  }
  const std::string waiting = ranks_.text(2);
  EXPECT_NE(waiting.find("1 ranks have not made this collective call within 6 s"), std::string::npos) << waiting;
}

// The one that waits for the third has the message of the one that dies.
TEST_P(RmaFailure, RankDiesAfterItsMessage_EndsTheCallOfTheOneThatWaits) {
  if (GetParam() != 14) GTEST_SKIP() << "the tables share this call";
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.keep_warnings();
    rank.connect();
    rank.create({});
    Words words(512);
    void* memory = nullptr;
    const auto call = [&] {
      return rank.net().reg_mr(rank.coll, words.data(), words.bytes(), nccl::kPtrHost, 0, &memory);
    };
    if (rank.number() == 2) {
      const std::vector<std::uint64_t> before = bytes_sent();
      std::thread waits(call);
      while (!all_have_sent_more(before)) std::this_thread::yield();
      ::_exit(0);
    }
    if (rank.number() == 0) {
      EXPECT_NE(call(), nccl::Result::kSuccess);
      ranks_.number(0) = 1;
    }
    // Nothing else wakes the one that waits.
    const Clock::time_point end = Clock::now() + kLimit;
    while (ranks_.number(0) == 0 && Clock::now() < end) std::this_thread::yield();
    EXPECT_EQ(ranks_.number(0), 1U);
    EXPECT_TRUE(has_error_soon(rank));
    EXPECT_OK(rank.net().close_coll(rank.coll));
    EXPECT_OK(rank.net().finalize(rank.instance));
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
  const std::string text = ranks_.text(0);
  EXPECT_NE(text.find("rank 2 on "), std::string::npos) << text;
}

// The two that differ find out, and do not wait for the third.
TEST_P(RmaFailure, RanksMakeDifferentCalls_FailWithoutTheOneThatMakesNone) {
  if (GetParam() != 14) GTEST_SKIP() << "the tables share this call";
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.keep_warnings();
    rank.connect();
    rank.create({});
    Words words(512);
    void* made = nullptr;
    if (rank.number() == 0) {
      EXPECT_NE(rank.net().reg_mr(rank.coll, words.data(), words.bytes(), nccl::kPtrHost, 0, &made),
                nccl::Result::kSuccess);
    }
    if (rank.number() == 1) {
      EXPECT_NE(rank.net().create_context(rank.coll, {}, &made), nccl::Result::kSuccess);
    }
    EXPECT_TRUE(has_error_soon(rank));
    rank.barrier();
    EXPECT_OK(rank.net().close_coll(rank.coll));
    EXPECT_OK(rank.net().finalize(rank.instance));
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
  const std::string text = std::string(ranks_.text(0)) + ranks_.text(1);
  EXPECT_NE(text.find(" makes another collective call. Next: "), std::string::npos) << text;
}

// A rank that has closed says so; the others notice only when they put to it.
TEST_P(RmaFailure, RankThatClosesEarly_FailsPutsToItOnly) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.keep_warnings();
    rank.connect();
    rank.create({});
    Words words(512);
    void* const memory = rank.register_memory(words.data(), words.bytes());
    rank.barrier();
    if (rank.number() == 2) {
      EXPECT_OK(rank.net().destroy_context(rank.contexts));
      EXPECT_OK(rank.net().close_coll(rank.coll));
    }
    rank.barrier();
    if (rank.number() == 0) {
      EXPECT_TRUE(rank.wait_ok(rank.put(0, {memory, 0}, 8, {memory, 8}, 1)));
      EXPECT_EQ(put_until_it_fails(rank, 0, memory, 2), nccl::Result::kRemoteError);
    }
    rank.barrier();
    EXPECT_OK(rank.net().finalize(rank.instance));
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
  const std::string text = ranks_.text(0);
  EXPECT_NE(text.find("rank 2 on "), std::string::npos) << text;
  EXPECT_NE(text.find("has closed"), std::string::npos) << text;
}

// The ranks reset them in turn, each before a collective call in which the others are.
TEST_P(RmaFailure, TcpConnectionsAreResetAgainAndAgain_NoCallFails) {
  constexpr int kCalls = 60;
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.keep_warnings();
    rank.connect();
    rank.create({});
    Words words(512);
    int resets = 0;
    for (int i = 0; i < kCalls; ++i) {
      if (i % 3 == rank.number()) resets += reset_connections();
      void* const memory = rank.register_memory(words.data(), words.bytes());
      EXPECT_NE(memory, nullptr) << i;
      EXPECT_TRUE(memory == nullptr || rank.wait_ok(rank.put(0, {memory, 0}, 8, {memory, 8}, rank.next()))) << i;
      rank.barrier();
      EXPECT_OK(rank.net().dereg_mr(rank.coll, memory));
    }
    EXPECT_GE(resets, kCalls / 3);
    if (rank.number() == 2) reset_connections();
    rank.close();
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
  for (const int rank : {0, 1, 2}) EXPECT_STREQ(ranks_.text(rank), "");
}

// Another thread resets them at any moment of many calls.
TEST_P(RmaFailure, TcpConnectionsAreResetAtAnyMoment_NoCallFails) {
  constexpr std::uint64_t kResets = 20;
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    std::atomic<std::uint64_t>& resets = ranks_.number(0);
    rank.keep_warnings();
    rank.connect();
    std::thread other([&] {
      while (rank.number() == 1 && resets < kResets) {
        if (reset_connections() > 0) ++resets;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    rank.create({.contexts = 4});
    Words words(512);
    for (bool goes_on = true; goes_on;) {
      void* const memory = rank.register_memory(words.data(), words.bytes());
      EXPECT_TRUE(memory != nullptr && rank.net().dereg_mr(rank.coll, memory) == nccl::Result::kSuccess);
      rank.barrier();
      if (rank.number() == 0) ranks_.number(1) = resets < kResets ? 1 : 0;
      rank.barrier();
      goes_on = ranks_.number(1) != 0 && memory != nullptr;
    }
    other.join();
    rank.close();
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
  for (const int rank : {0, 1, 2}) EXPECT_STREQ(ranks_.text(rank), "");
}

// The NIC repeats the signal after 0.54 s: the rank that has closed acknowledges it then.
TEST_P(RmaFailure, RankThatClosesWhenAnAcknowledgementIsLost_FailsNothing) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    ::setenv("VERBATIM_TIMEOUT", "17", 1);
    ::setenv("VERBATIM_CLOSE_TIMEOUT_MS", "30000", 1);
    if (rank.number() == 0) ::setenv("SOFTVERBS_FAULTS", "drop-ack op=fetch_add", 1);
    rank.keep_warnings();
    rank.connect();
    rank.create({});
    Words words(512);
    Words signals(512);
    void* const memory = rank.register_memory(words.data(), words.bytes());
    void* const signal_memory = rank.register_memory(signals.data(), signals.bytes(), nccl::kMrForceStrictOrdering);
    if (rank.number() == 0) {
      const RmaSignal signal{.word = {signal_memory, 0}, .operation = nccl::kSignalIncrement};
      EXPECT_TRUE(rank.wait_ok(rank.put_signal(0, {memory, 0}, 8, {memory, 8}, 2, signal)));
    }
    if (rank.number() == 2) {
      EXPECT_TRUE(rank.wait_for(signals[0], 1));
    }
    EXPECT_OK(rank.net().destroy_context(rank.contexts));
    EXPECT_OK(rank.net().close_coll(rank.coll));
    EXPECT_OK(rank.net().finalize(rank.instance));
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
  EXPECT_STREQ(ranks_.text(0), "");
}

// The fourth call: three have made the QPs.
TEST_P(RmaFailure, QpCannotBeConnected_TheLineNamesCauseAndPath) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    if (rank.number() == 0) ::setenv("SOFTVERBS_FAULTS", "fail verb=modify_qp nth=4 errno=EINVAL", 1);
    rank.keep_warnings();
    rank.connect();
    ASSERT_NE(rank.coll, nullptr);
    EXPECT_NE(rank.net().create_context(rank.coll, {.contexts = 1}, &rank.contexts), nccl::Result::kSuccess);
    EXPECT_OK(rank.net().close_coll(rank.coll));
    EXPECT_OK(rank.net().finalize(rank.instance));
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
  const std::string own = ranks_.text(0);
  for (const char* part : {"connecting QPs to rank 1 on ",
                           "ibv_modify_qp to RTR: Invalid argument: the device refuses an attribute: GID 3",
                           ". Next: 'show_gids softverbs0'", ". Path: "}) {
    EXPECT_NE(own.find(part), std::string::npos) << part << " is missing in: " << own;
  }
  const std::string other = ranks_.text(2);
  EXPECT_NE(other.find("it failed at rank 0 on "), std::string::npos) << other;
}

TEST_P(RmaFailure, AddressOfThePortHasGone_TheLineNamesIt) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    ::setenv("VERBATIM_TIMEOUT", "12", 1);
    const char* const faults =
        "gid device=0 index=3 address=none op=write qp=any after=1; unreachable device=0 op=write qp=any after=2";
    if (rank.number() == 0) ::setenv("SOFTVERBS_FAULTS", faults, 1);
    rank.keep_warnings();
    rank.connect();
    rank.create({});
    Words words(512);
    void* const memory = rank.register_memory(words.data(), words.bytes());
    rank.barrier();
    if (rank.number() == 0) {
      EXPECT_EQ(put_until_it_fails(rank, 0, memory, 1), nccl::Result::kRemoteError);
    }
    EXPECT_TRUE(has_error_soon(rank));
    rank.barrier();
    EXPECT_OK(rank.net().close_coll(rank.coll));
    EXPECT_OK(rank.net().finalize(rank.instance));
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
  const std::string own = ranks_.text(0);
  EXPECT_NE(own.find(": GID 3 of softverbs0:1 on "), std::string::npos) << own;
  EXPECT_NE(own.find(" is no longer "), std::string::npos) << own;
}

}  // namespace
}  // namespace rma_test
