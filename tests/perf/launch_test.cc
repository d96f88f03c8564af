// Ranks that a launcher or a user has started separately: they form one job, or each of them ends within --timeout and
// says why.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/unique_fd.h"
#include "perf_run.h"

namespace verbatim::perf {
namespace {

using Arguments = std::vector<std::string>;

Arguments all_reduce(const Arguments& more) {
  Arguments all{"all_reduce", "--plugin", setting("PERF_PLUGIN"), "-b", "64", "-e", "1K", "-n", "2"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

// Starts a rank with the arguments and environment of each element, and returns the outcomes in their order.
struct Start {
  Arguments arguments;
  PerfProcess::Environment environment = {};
};
std::vector<Outcome> run_all(const std::vector<Start>& starts) {
  std::vector<std::unique_ptr<PerfProcess>> ranks;
  for (const Start& start : starts) {
    ranks.push_back(std::make_unique<PerfProcess>(all_reduce(start.arguments), start.environment));
  }
  std::vector<Outcome> outcomes;
  for (const auto& rank : ranks) outcomes.push_back(rank->finish());
  return outcomes;
}

std::string local_root(std::uint16_t port) {
  return "127.0.0.1:" + std::to_string(port);
}

Arguments by_hand(const std::string& root, int rank, int ranks, const Arguments& more = {}) {
  Arguments all{"--root", root, "--rank", std::to_string(rank), "--nranks", std::to_string(ranks)};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

void expect_contains(const Outcome& outcome, const std::string& text) {
  EXPECT_NE(std::string::npos, outcome.output.find(text)) << "'" << text << "' is not in:\n" << outcome.output;
}

void expect_one_job(const std::vector<Outcome>& outcomes) {
  for (const Outcome& outcome : outcomes) EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
  expect_contains(outcomes.front(), "# Wrong elements    : 0 OK\n");
  expect_contains(outcomes.front(), "# rank    " + std::to_string(outcomes.size() - 1));
  for (std::size_t rank = 1; rank < outcomes.size(); ++rank) EXPECT_EQ("", outcomes[rank].output);
}

TEST(LaunchedRanks, OpenMpi_FormOneJob) {
  std::vector<Start> ranks;
  for (const char* rank : {"0", "1", "2", "3"}) {
    ranks.push_back({{"--timeout", "60"},
                     {"VERBATIM_TOKEN=", "OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_LOCAL_SIZE=4",
                      std::string("OMPI_COMM_WORLD_RANK=") + rank, std::string("OMPI_COMM_WORLD_LOCAL_RANK=") + rank}});
  }
  expect_one_job(run_all(ranks));
}

TEST(LaunchedRanks, Pmi_FormOneJob) {
  expect_one_job(run_all(
      {{{}, {"VERBATIM_TOKEN=", "PMI_RANK=0", "PMI_SIZE=2"}}, {{}, {"VERBATIM_TOKEN=", "PMI_RANK=1", "PMI_SIZE=2"}}}));
}

TEST(LaunchedRanks, SlurmStep_FormsOneJob) {
  // Two hosts, so that the ranks meet at the address of the first: this host.
  const std::string id = "SLURM_JOB_ID=" + std::to_string(free_port());
  std::vector<Start> ranks;
  for (const char* rank : {"0", "1"}) {
    ranks.push_back({{},
                     {id, "SLURM_STEP_ID=0", "SLURM_NTASKS=2", "SLURM_STEP_NUM_NODES=2",
                      "SLURM_STEP_NODELIST=localhost,elsewhere", std::string("SLURM_PROCID=") + rank}});
  }
  expect_one_job(run_all(ranks));
}

TEST(LaunchedRanks, SeveralHostsWithoutAToken_AreRefusedWithTheReason) {
  const Outcome outcome = run(all_reduce({}), {"SLURM_JOB_ID=1", "SLURM_STEP_ID=0", "SLURM_NTASKS=2", "SLURM_PROCID=0",
                                               "SLURM_STEP_NODELIST=localhost,elsewhere", "VERBATIM_TOKEN="});
  EXPECT_EQ(kUsage, outcome.status);
  expect_contains(outcome, "ranks that meet at localhost:");
  expect_contains(outcome, "need a secret, so that no other process joins them. Next: export VERBATIM_TOKEN=");
}

TEST(LaunchedRanks, Torchrun_FormOneJob) {
  const std::string port = "MASTER_PORT=" + std::to_string(free_port());
  std::vector<Start> ranks;
  for (const char* rank : {"0", "1"}) {
    ranks.push_back({{}, {"WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", port, std::string("RANK=") + rank}});
  }
  expect_one_job(run_all(ranks));
}

TEST(LaunchedRanks, RootWithoutRank_TakesRankOfLauncher) {
  const std::string root = local_root(free_port());
  std::vector<Start> ranks;
  for (const char* rank : {"0", "1"}) {
    ranks.push_back({{"--root", root},
                     {"OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_LOCAL_SIZE=1",
                      std::string("OMPI_COMM_WORLD_RANK=") + rank, "OMPI_COMM_WORLD_LOCAL_RANK=0"}});
  }
  expect_one_job(run_all(ranks));
}

TEST(LaunchedRanks, ContradictingOptions_AreRejected) {
  const PerfProcess::Environment several{"OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_LOCAL_SIZE=1",
                                         "OMPI_COMM_WORLD_RANK=0"};
  const Outcome no_address = run(all_reduce({}), several);
  EXPECT_EQ(kUsage, no_address.status);
  expect_contains(no_address, "Open MPI has started 2 ranks on several hosts");
  expect_contains(no_address, "Next: give all of them --root HOST:PORT");
  const Outcome procs = run(all_reduce({"--procs", "2"}), several);
  EXPECT_EQ(kUsage, procs.status);
  expect_contains(procs, "Next: leave --procs out");
  const Outcome compare = run({"all_reduce", "--compare", "a.so"}, {"PMI_SIZE=2", "PMI_RANK=0"});
  EXPECT_EQ(kUsage, compare.status);
  expect_contains(compare, "mpirun");
  for (const char* subcommand : {"cost", "qp-order"}) {
    const Outcome outcome = run({subcommand, "--plugin", "a.so"}, {"PMI_SIZE=2", "PMI_RANK=0"});
    EXPECT_EQ(kUsage, outcome.status);
    expect_contains(outcome,
                    std::string(subcommand) + " starts its own processes, but PMI has started 2 of it. Next: ");
  }
}

TEST(LaunchedRanks, MissingRank_IsNamedAtTimeout) {
  const auto outcomes =
      run_all({{{"--timeout", "8"}, {"PMI_SIZE=3", "PMI_RANK=0"}}, {{"--timeout", "8"}, {"PMI_SIZE=3", "PMI_RANK=1"}}});
  EXPECT_EQ(kTimeout, outcomes[0].status);
  expect_contains(outcomes[0], "not finished after 8 s (--timeout): rank 2 did not connect");
  EXPECT_EQ(kTimeout, outcomes[1].status);
  expect_contains(outcomes[1], "rank 1: ");
  expect_contains(outcomes[1], "not finished after 8 s (--timeout)");
}

TEST(LaunchedRanks, NoRankZero_EndsAtTimeout) {
  const auto outcomes = run_all({{{"--timeout", "4"}, {"PMI_SIZE=2", "PMI_RANK=1"}},
                                 {by_hand(local_root(free_port()), 1, 2, {"--timeout", "4"})}});
  EXPECT_EQ(kTimeout, outcomes[0].status);
  expect_contains(outcomes[0], "rank 1: rank 0 does not run on this host");
  expect_contains(outcomes[0], "Next: for ranks on several hosts give all of them --root");
  EXPECT_EQ(kTimeout, outcomes[1].status);
  expect_contains(outcomes[1], "rank 1: no coordinator accepts connections at 127.0.0.1:");
  expect_contains(outcomes[1], "(Connection refused)");
}

TEST(RanksByHand, ListenerWithoutAnswer_EndsAtTimeout) {
  const std::uint16_t port = free_port();
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  ASSERT_EQ(0, ::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address));
  ASSERT_EQ(0, ::listen(listener.get(), 8));
  const std::uint64_t begin = monotonic_ns();
  const Outcome outcome = run_all({{by_hand(local_root(port), 1, 2, {"--timeout", "4"})}}).front();
  EXPECT_EQ(kTimeout, outcome.status);
  expect_contains(outcome, "accepts connections, but sends no answer. Next: ");
  EXPECT_LT(monotonic_ns() - begin, 30 * kNanosecondsPerSecond);
}

TEST(RanksByHand, OtherToken_IsNamedAtBothEnds) {
  const std::string root = local_root(free_port());
  PerfProcess first(all_reduce(by_hand(root, 0, 2)));
  PerfProcess rejected(all_reduce(by_hand(root, 1, 2)), {"VERBATIM_TOKEN=the token of another job"});
  const Outcome outcome = rejected.finish();
  EXPECT_EQ(kUsage, outcome.status);
  expect_contains(outcome,
                  "rank 1: rank 0 rejects this rank: it has another VERBATIM_TOKEN, or is of another job. Next: ");
  const std::string line = first.wait_for_line("rejected a process at 127.0.0.1:");
  EXPECT_NE(std::string::npos, line.find("that calls itself rank 1: it has another VERBATIM_TOKEN")) << line;
  // The job still waits for its own rank 1.
  PerfProcess second(all_reduce(by_hand(root, 1, 2)));
  EXPECT_EQ(kCorrect, second.finish().status);
  EXPECT_EQ(kCorrect, first.finish().status);
}

TEST(RanksByHand, OtherNumberOfRanks_IsNamedAtBothEnds) {
  const std::string root = local_root(free_port());
  const auto outcomes = run_all({{by_hand(root, 0, 2)}, {by_hand(root, 1, 3)}});
  EXPECT_EQ(kUsage, outcomes[0].status);
  expect_contains(outcomes[0], "rank 1 disagrees with rank 0: --nranks 3 instead of 2");
  EXPECT_EQ(kUsage, outcomes[1].status);
  expect_contains(outcomes[1], "rank 0 rejects this rank: --nranks 3 instead of 2");
}

TEST(RanksByHand, RankTwice_IsNamed) {
  const std::string root = local_root(free_port());
  const auto outcomes = run_all({{by_hand(root, 0, 3)}, {by_hand(root, 1, 3)}, {by_hand(root, 1, 3)}});
  for (const Outcome& outcome : outcomes) EXPECT_EQ(kUsage, outcome.status) << outcome.output;
  expect_contains(outcomes[0], "two processes are rank 1 (--rank), and rank ");  // also rank 0, if it was late
  expect_contains(outcomes[0], "2 did not connect");
}

TEST(RanksByHand, DifferentOptions_AreNamedBeforeDataFlows) {
  const auto disagree = [](const Arguments& of_second, const std::string& difference) {
    const std::string root = local_root(free_port());
    Arguments second{"all_reduce", "--plugin", setting("PERF_PLUGIN")};
    for (const Arguments& more : {by_hand(root, 1, 2), of_second})
      second.insert(second.end(), more.begin(), more.end());
    PerfProcess first(
        {"all_reduce", "--plugin", setting("PERF_PLUGIN"), "--root", root, "--rank", "0", "--nranks", "2"});
    PerfProcess other(second);
    const Outcome of_other = other.finish();
    const Outcome outcome = first.finish();
    EXPECT_EQ(kUsage, outcome.status);
    EXPECT_EQ(kUsage, of_other.status);
    expect_contains(outcome, "rank 1 disagrees with rank 0 about the " + difference);
    expect_contains(of_other, "rank 1 disagrees with rank 0 about the " + difference);
    EXPECT_EQ(std::string::npos, outcome.output.find("#wrong"));
  };
  disagree({"--channels", "2"}, "number of channels (--channels): 2 instead of 1");
  disagree({"-e", "64M"}, "largest size (--maxbytes): 67108864 instead of 33554432");
  disagree({"-d", "int32"}, "type (--datatype): int32 instead of float");
  disagree({"-n", "21"}, "timed iterations (--iters): 21 instead of 20");
}

TEST(RanksByHand, FailedRank_EveryRankSaysWhy) {
  const std::string root = local_root(free_port());
  PerfProcess first(all_reduce(by_hand(root, 0, 3)));
  PerfProcess second(all_reduce(by_hand(root, 1, 3, {"--timeout", "10"})));
  Arguments without_plugin = by_hand(root, 2, 3, {"--plugin", "/no/plugin.so"});
  without_plugin.insert(without_plugin.begin(), "all_reduce");
  PerfProcess failing(without_plugin);
  const Outcome of_second = second.finish();
  for (const Outcome& outcome : {first.finish(), failing.finish()}) {
    EXPECT_EQ(kFailed, outcome.status) << outcome.output;
    expect_contains(outcome, "rank 2: /no/plugin.so");
  }
  // On a busy machine rank 1 may connect only when rank 0 has ended.
  EXPECT_NE(kCorrect, of_second.status);
  expect_contains(of_second,
                  of_second.status == kTimeout ? "rank 1: no coordinator" : "rank 1: stopped: rank 2: /no/plugin.so");
}

// The address of another host must not become "any address".
TEST(RanksByHand, RootOfAnotherHost_IsNotListenedAt) {
  const Outcome outcome = run(all_reduce(by_hand("192.0.2.1:" + std::to_string(free_port()), 0, 2)));
  EXPECT_EQ(kFailed, outcome.status);
  expect_contains(outcome, "listening for the other ranks at 192.0.2.1:");
  expect_contains(outcome, "Next: --root must be an address of the host on which rank 0 runs");
}

TEST(RanksByHand, Root_IsTheOnlyAddressListenedAt) {
  const std::uint16_t port = free_port();
  const auto outcomes = run_all({{by_hand("127.0.0.2:" + std::to_string(port), 0, 2, {"--timeout", "6"})},
                                 {by_hand(local_root(port), 1, 2, {"--timeout", "4"})}});
  EXPECT_EQ(kTimeout, outcomes[0].status);
  expect_contains(outcomes[0], "rank 1 did not connect");
  EXPECT_EQ(kTimeout, outcomes[1].status);
  expect_contains(outcomes[1], "(Connection refused)");
}

// With Open MPI itself: only with --full.
TEST(Mpirun, FourRanks_FormOneJob) {
  Arguments arguments{"-np", "4", setting("PERF_TOOL")};
  for (const std::string& argument : all_reduce({"--timeout", "60"})) arguments.push_back(argument);
  const PerfProcess::Environment as_root_on_few_cores{"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                                                      "OMPI_MCA_rmaps_base_oversubscribe=1",
                                                      "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe"};
  const Outcome outcome = PerfProcess(arguments, as_root_on_few_cores, "MPIRUN").finish();
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
  expect_contains(outcome, "# rank    3");
  const std::size_t footer = outcome.output.find("# Wrong elements    : 0 OK\n");
  ASSERT_NE(std::string::npos, footer) << outcome.output;
  EXPECT_EQ(std::string::npos, outcome.output.find("# Wrong elements", footer + 1)) << "several jobs";
}

}  // namespace
}  // namespace verbatim::perf
