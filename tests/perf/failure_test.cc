// verbatim-perf after failures: it ends soon, with the correct status and a line with the reason.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/unique_fd.h"
#include "perf_run.h"

namespace verbatim::perf {
namespace {

// Ranks that poll without a pause would take all processors from the tests beside this one.
std::vector<std::string> endless(const std::string& timeout) {
  return {"sendrecv", "--plugin", setting("PERF_PLUGIN"), "--procs",   "3",     "-b",      "8",  "-e",
          "8",        "-n",       "1000000000",           "--timeout", timeout, "--pause", "500"};
}

// The pid of a rank, from the header of the table.
pid_t pid_of(PerfProcess& running, int rank) {
  const std::string line = running.wait_for_line("# rank    " + std::to_string(rank));
  const std::size_t at = line.find("pid");
  return at == std::string::npos ? -1 : std::atoi(line.c_str() + at + 3);
}

bool contains(const Outcome& outcome, const std::string& text) {
  return outcome.output.find(text) != std::string::npos;
}

TEST(PerfFailure, MissingPlugin_IsNamed) {
  const Outcome outcome = run({"sendrecv", "--plugin", "/does/not/exist.so"});
  EXPECT_EQ(kFailed, outcome.status);
  EXPECT_TRUE(contains(outcome, "/does/not/exist.so")) << outcome.output;
}

TEST(PerfFailure, InvalidOption_IsNamed) {
  const Outcome outcome = run({"sendrecv", "--plugin", "p.so", "-b", "many"});
  EXPECT_EQ(kUsage, outcome.status);
  EXPECT_TRUE(contains(outcome, "many")) << outcome.output;
}

TEST(PerfFailure, RankKilled_EndsJob) {
  PerfProcess running(endless("60"));
  const pid_t killed = pid_of(running, 2);
  ASSERT_GT(killed, 0);
  ASSERT_FALSE(running.wait_for_line("#wrong").empty());
  const std::uint64_t begin = monotonic_ns();
  ASSERT_EQ(0, kill(killed, SIGKILL));
  const Outcome outcome = running.finish();
  EXPECT_EQ(kFailed, outcome.status) << outcome.output;
  EXPECT_TRUE(contains(outcome, "rank 2")) << outcome.output;
  EXPECT_LT(monotonic_ns() - begin, 15 * kNanosecondsPerSecond);
  EXPECT_NE(0, kill(killed, 0)) << "the process of the rank still exists";
}

TEST(PerfFailure, RankHangs_TimeoutEndsJob) {
  PerfProcess running(endless("6"));  // from its start, and all ranks must be in the table before
  const pid_t hanging = pid_of(running, 1);
  ASSERT_GT(hanging, 0);
  ASSERT_EQ(0, kill(hanging, SIGSTOP));
  const Outcome outcome = running.finish();
  EXPECT_EQ(kTimeout, outcome.status) << outcome.output;
  EXPECT_TRUE(contains(outcome, "--timeout")) << outcome.output;
  EXPECT_NE(0, kill(hanging, 0)) << "the process of the rank still exists";
}

// They are warnings of the plugin, which are otherwise printed only with --plugin-log.
TEST(PerfFailure, FilesThatCannotBeOpened_AreReported) {
  if (setting("PERF_PLUGIN").find("verbatim") == std::string::npos) GTEST_SKIP() << "another plugin";
  const std::vector<std::string> arguments{"sendrecv", "--plugin", setting("PERF_PLUGIN"), "-b", "8", "-e", "8"};
  const Outcome outcome =
      run(arguments, {"VERBATIM_STATS=/no/directory/stats.json", "VERBATIM_STATE_SOCKET=/no/directory/state"});
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
  for (const char* rank : {"rank 0: the plugin has warned:\n", "rank 1: the plugin has warned:\n"}) {
    EXPECT_TRUE(contains(outcome, rank)) << outcome.output;
  }
  EXPECT_TRUE(contains(outcome, "writing /no/directory/stats.json (VERBATIM_STATS) failed")) << outcome.output;
  EXPECT_TRUE(contains(outcome, "no state can be read at /no/directory/state (VERBATIM_STATE_SOCKET)"))
      << outcome.output;
  EXPECT_FALSE(contains(run(arguments), "warned"));
}

std::vector<std::string> rank_between_hosts(std::uint16_t port, int rank, const std::string& iterations) {
  return {"all_reduce",
          "--plugin",
          setting("PERF_PLUGIN"),
          "--root",
          "127.0.0.1:" + std::to_string(port),
          "--rank",
          std::to_string(rank),
          "--nranks",
          "2",
          "-b",
          "64",
          "-e",
          "1K",
          "-n",
          iterations,
          "--timeout",
          "30"};
}

// Waits until the coordinator listens, and sends bytes of another protocol to it.
void send_noise(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  for (int i = 0; i < 500; ++i) {
    const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
      const std::string noise(200, 'x');
      EXPECT_EQ(static_cast<ssize_t>(noise.size()), ::send(fd.get(), noise.data(), noise.size(), MSG_NOSIGNAL));
      return;
    }
    usleep(10'000);
  }
  FAIL() << "no process listens at port " << port;
}

TEST(BetweenHosts, ForeignConnection_IsIgnored) {
  const std::uint16_t port = free_port();
  PerfProcess first(rank_between_hosts(port, 0, "2"));
  send_noise(port);
  PerfProcess second(rank_between_hosts(port, 1, "2"));
  const Outcome first_outcome = first.finish();
  const Outcome second_outcome = second.finish();
  EXPECT_EQ(0, first_outcome.status) << first_outcome.output;
  EXPECT_EQ(0, second_outcome.status) << second_outcome.output;
  EXPECT_TRUE(contains(first_outcome, "0 OK")) << first_outcome.output;
}

TEST(BetweenHosts, RankKilled_EndsOtherRank) {
  const std::uint16_t port = free_port();
  PerfProcess root(rank_between_hosts(port, 0, "1000000000"));
  const PerfProcess other(rank_between_hosts(port, 1, "1000000000"));
  const pid_t killed = pid_of(root, 1);
  ASSERT_GT(killed, 0);
  ASSERT_FALSE(root.wait_for_line("#wrong").empty());
  ASSERT_EQ(0, kill(killed, SIGKILL));
  const Outcome outcome = root.finish();
  EXPECT_EQ(kFailed, outcome.status) << outcome.output;
  EXPECT_TRUE(contains(outcome, "rank 1 closed its connection unexpectedly") || contains(outcome, "plugin"))
      << outcome.output;
}

}  // namespace
}  // namespace verbatim::perf
