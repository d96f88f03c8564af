// The job finds what it must find: each of these plugins passes on what another one does, and changes one message or
// one call.
#include "simulation/job.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "simulation/captured_run.h"
#include "simulation/shrink.h"

namespace simulation {
namespace {

struct Mutation {
  const char* mode;
  const char* finding;
};

std::ostream& operator<<(std::ostream& stream, const Mutation& mutation) {
  return stream << mutation.mode;
}

using Condition = bool (*)(const Job& job, std::size_t processes);

bool has_messages_only(const Job& job, std::size_t processes) {
  return job.puts.ranks == 0 && job.processes == processes;
}

// The mutating plugin has no table of the network, and one version.
bool has_puts_only(const Job& job, std::size_t processes) {
  return job.puts.ranks == processes && job.connections.empty() && job.puts.version == 14 &&
         std::all_of(job.ports.begin(), job.ports.end(), [](std::size_t ports) { return ports == 1; });
}

struct Mutated {
  std::uint64_t seed = 0;
  Job job;
};

// The first seed from `seed` on whose job meets the condition. `library`: the variable with the path of the plugin that
// mutates.
Mutated draw_mutated(const char* library, const char* mode, Condition condition, std::size_t processes,
                     std::uint64_t seed = 1) {
  ::setenv("MUTATE_MODE", mode, 1);
  const char* const plugin = std::getenv(library);
  if (plugin == nullptr) throw std::runtime_error(std::string(library) + " is not set");
  for (;; ++seed) {
    Job job = draw_job({.seed = seed, .faults = ChosenFaults{}}, plugin);
    if (condition(job, processes)) return {seed, std::move(job)};
  }
}

CapturedRun run_mutated(const char* library, const char* mode, Condition condition, std::size_t processes,
                        std::uint64_t seed = 1) {
  const Mutated mutated = draw_mutated(library, mode, condition, processes, seed);
  return captured_run(plan_of(mutated.job, mutated.seed), processes,
                      [&](std::size_t process) { return run_job(mutated.job, process); });
}

CapturedRun run_messages(const char* mode, std::size_t processes) {
  return run_mutated("MUTATE", mode, has_messages_only, processes);
}

CapturedRun run_puts(const char* mode, std::size_t ranks, std::uint64_t seed = 1) {
  return run_mutated("MUTATE_RMA", mode, has_puts_only, ranks, seed);
}

void expect_finding(const CapturedRun& captured, const char* finding) {
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find(finding), std::string::npos) << captured.text;
}

class MutatedMessages : public testing::TestWithParam<Mutation> {};

TEST_P(MutatedMessages, MessageThatIsChanged_IsFound) {
  for (std::size_t processes = 1; processes <= 3; ++processes) {
    expect_finding(run_messages(GetParam().mode, processes), GetParam().finding);
  }
}

INSTANTIATE_TEST_SUITE_P(Simulation, MutatedMessages,
                         testing::Values(Mutation{"flip-byte", "wrong bytes: 1 in group"},
                                         Mutation{"skip-tail", "wrong bytes: 3 in group"},
                                         Mutation{"overrun", "wrong bytes: 1 behind messages"},
                                         Mutation{"wrong-size", " bytes reports "},
                                         Mutation{"late", "wrong bytes: 1 in group"}));

class MutatedPuts : public testing::TestWithParam<Mutation> {};

TEST_P(MutatedPuts, CallThatIsChanged_IsFound) {
  for (std::size_t ranks = 2; ranks <= kMaxRanks; ++ranks) {
    expect_finding(run_puts(GetParam().mode, ranks), GetParam().finding);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Simulation, MutatedPuts,
    testing::Values(Mutation{"flip-byte", "wrong bytes: 1 of put "}, Mutation{"short", "wrong bytes: 1 of "},
                    Mutation{"overrun", " beside what was put into window"},
                    Mutation{"no-data", " of put with signal "}, Mutation{"no-put", " of put "},
                    Mutation{"no-signal", "signal lost: "}, Mutation{"twice", "signal counted 2 times: "},
                    Mutation{"value", "signal counted "}, Mutation{"extra", "wrong bytes: beside the signals"}));

// Not where nobody looks between the two, as with a signal to the rank itself.
TEST(SimulatedJob, SignalBeforeItsPut_IsFoundWhereItIsSeen) {
  std::size_t found = 0;
  for (std::uint64_t seed = 1; seed < 200; seed += 20) {
    found += run_puts("early", kMaxRanks, seed).text.find(" of put with signal ") != std::string::npos ? 1U : 0U;
  }
  EXPECT_GT(found, 0U);
}

TEST(SimulatedJob, NothingIsChanged_Passes) {
  for (std::size_t processes = 1; processes <= 3; ++processes) {
    const CapturedRun messages = run_messages("none", processes);
    EXPECT_TRUE(messages.result.passed) << messages.text;
    const CapturedRun puts = run_puts("none", processes + 1);
    EXPECT_TRUE(puts.result.passed) << puts.text;
  }
}

TEST(SimulatedJob, OtherSeed_MayHaveManyProcesses) {
  std::size_t with_many = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    const Job job = draw_job({.seed = seed, .faults = ChosenFaults{}}, "plugin");
    EXPECT_LE(job.processes, kMostProcesses);
    with_many += job.processes > kMaxRanks ? 1U : 0U;
  }
  EXPECT_GT(with_many, 1U);
  EXPECT_LT(with_many, 20U);
}

TEST(SimulatedJob, OtherSeed_MayHaveDevicesOfADriver) {
  std::set<std::string> met;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) met.insert(draw_job({.seed = seed}, "plugin").devices);
  EXPECT_EQ(met.size(), kDevices.size());
}

// What they lack is said only of them.
TEST(SimulatedJob, DevicesThatDoNotSayWhatTheyHaveExecuted_AreNamed) {
  std::uint64_t seed = 1;
  const auto draw = [&] {
    return draw_job({.seed = seed, .faults = ChosenFaults{}, .devices = "bnxt_re"}, std::getenv("MUTATE_PLUGIN"));
  };
  Job job = draw();
  while (job.puts.ranks != 2 || job.ports[0] == 1 || job.ports[1] == 1) job = (++seed, draw());
  const auto run_once = [&] {
    return captured_run(plan_of(job, seed), 2, [&](std::size_t process) { return run_job(job, process); });
  };
  const CapturedRun named = run_once();
  EXPECT_TRUE(named.result.passed) << named.text;
  job.devices = kDevices.front();
  expect_finding(run_once(), " does not say what a QP in the error state has executed (");
}

TEST(SimulatedJob, ConnectionWithoutSender_ReachesTheLimit) {
  Job job = draw_mutated("MUTATE", "none", has_messages_only, 1).job;
  job.connections.front().sender = job.processes;
  const CapturedRun captured =
      captured_run({.limit = kJobLimit}, job.processes, [&](std::size_t process) { return run_job(job, process); });
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("limit of virtual time"), std::string::npos) << captured.text;
}

// A connection between two processes, whose receives all have optional completion. The last message has so many bytes
// less than the receiver waits for.
CapturedRun run_optional(std::size_t missing) {
  for (std::uint64_t seed = 1;; ++seed) {
    const Job job =
        draw_job({.seed = seed, .faults = ChosenFaults{}, .has_optional = true}, std::getenv("MUTATE_PLUGIN"));
    if (!has_messages_only(job, 2) || job.connections.size() != 1) continue;
    const ConnectionPlan& plan = job.connections.front();
    const bool all = std::all_of(plan.groups.begin(), plan.groups.end(),
                                 [](const Group& group) { return group.completes_optionally; });
    if (!all || plan.receiver == plan.sender) continue;
    Job of_sender = job;
    of_sender.connections.front().groups.back().sizes.front() -= missing;
    return captured_run(plan_of(job, seed), job.processes, [&](std::size_t process) {
      return run_job(process == plan.sender ? of_sender : job, process);
    });
  }
}

TEST(SimulatedJob, ReceiveWithOptionalCompletion_IsDoneWithItsLastByte) {
  const CapturedRun complete = run_optional(0);
  EXPECT_TRUE(complete.result.passed) << complete.text;
  expect_finding(run_optional(1), "limit of virtual time");
}

// Runs that have failed, as `simulation --shrink` prints them.
class FailedOnce : public testing::TestWithParam<const char*> {};

TEST_P(FailedOnce, Run_Passes) {
  const std::optional<Choice> choice = parse_choice(GetParam());
  ASSERT_TRUE(choice);
  const Tried tried = try_run(*choice, std::getenv("MUTATE_PLUGIN"));
  EXPECT_TRUE(tried.result.passed) << tried.text;
}

INSTANTIATE_TEST_SUITE_P(
    Simulation, FailedOnce,
    testing::Values(
        "--seed 3450 --faults memory,abort --operations 32",  // no memory to name the cause
        "--seed 187 --faults memory",                         // the burst of QPs is given up
        "--seed 629 --faults memory --operations 1",          // likewise
        "--seed 1128 --faults port/3 --operations 1",         // no lane of RMA comes back
        // No memory to say how a lane of RMA has failed.
        "--seed 744867 --faults port/1/3/4/5,hang,memory --operations 2 --order 5",
        "--seed 80 --faults port/1/2,memory --operations 1",  // no memory for the shares of the lanes that work
        // An atomic finds that the target has ended, before its record lock shows it.
        "--seed 1051509 --faults death --parts 1,3 --operations 16 --order 5 --devices irdma",
        // A flush to oneself fails on the lane of a device that has failed; puts use another lane.
        "--seed 1081263 --faults port,qp --operations 64 --order 7",
        // The receiver has seen no acknowledgement, and the sender has said that a receive was announced to it.
        "--seed 1015659 --faults port/1/3/4 --parts 1 --operations 8 --order 18 --optional yes",
        "--seed 2064558",  // nothing has worked yet when the link goes down
        // The completion of a flush is lost, and the sender has closed.
        "--seed 1067336 --faults hang,qp",
        // One end waits for the lane; the other one has seen no acknowledgement.
        "--seed 1044453 --faults gid/1 --operations 2 --optional yes",
        "--seed 1090113 --faults qp --operations 4",  // no GID can be read, because the device has failed
        // No memory for the renewal of a lane.
        "--seed 701160 --faults port/1/2/4/5,refused,memory --parts 0,2,puts --operations 32 --order 23",
        // The peer has ended, and neither a lane nor the side channel comes back.
        "--seed 5672 --faults loss/2,cut,death --parts 0,puts --operations 16 --order 1",
        "--seed 3057 --faults port/1,hang --parts 0 --operations 1",    // the link is down at init
        "--seed 3166 --faults port/1/2/3,unanswered",                   // no lane, and no answer over TCP
        "--seed 18083 --faults port/1,hang",                            // there are fewer devices to merge
        "--seed 4928 --faults verb --processes 2 --operations 1",       // a trial of a reset QP is refused
        "--seed 8933 --faults port/2,memory --operations 1 --order 6",  // no memory for a lane of RMA
        "--seed 19253 --faults unanswered,verb --operations 4",         // an end has failed, and its process goes on
        "--seed 48156 --faults loss,gid",                               // the GID is away at the first flush
        "--seed 28283 --faults port/1/2 --operations 1",    // a lane has an event, the peer's other one, too
        "--seed 58407 --faults port/1,abort --parts puts",  // a rank aborts, and its port is down
        // All ports of a rank are down while it, or another one, creates its contexts.
        "--seed 186322 --faults port/1/3 --operations 1 --order 2",
        "--seed 212999 --faults port/1/3 --operations 1 --order 1",
        // A registration is refused while a put from other memory is under way.
        "--seed 207712 --faults port/2,verb --operations 1 --order 1",
        // A lane fails, the other one works, and the ends cannot agree.
        "--seed 143633 --faults cut,gid --processes 1 --parts 0 --operations 1 --order 1",
        // A set of contexts is done, and its peer waits for a signal of it that has to be posted again.
        "--seed 406651 --faults port/4 --parts puts --operations 1 --order 6",
        // A rank closes with requests under way, without a lane, and its peer waits for their signals.
        "--seed 416244 --faults port/1/3/5,refused --operations 1 --order 7",
        // A rank waits for the answer of a peer over a TCP connection over which nothing arrives, and gives up.
        "--seed 488169 --faults port/5,unanswered --operations 1 --order 1",
        // An end has failed, and the other one waits for a lane, over a TCP connection over which nothing arrives.
        "--seed 510057 --faults late,unanswered,verb --order 4",
        // Each end of a connection waits for its own port on one lane, and for the other end on another one.
        "--seed 470435 --faults port/2/5 --operations 2"));

// Likewise, when more packets were lost than are drawn today.
struct RunWithLosses {
  const char* choice;
  std::vector<const char*> rates;  // by process; nullptr: that which is drawn
};

std::ostream& operator<<(std::ostream& stream, const RunWithLosses& run) {
  return stream << run.choice;
}

class FailedOnceWithLosses : public testing::TestWithParam<RunWithLosses> {};

TEST_P(FailedOnceWithLosses, Run_Passes) {
  const std::optional<Choice> choice = parse_choice(GetParam().choice);
  ASSERT_TRUE(choice);
  Job job = draw_job(*choice, std::getenv("MUTATE_PLUGIN"));
  for (std::size_t process = 0; process < GetParam().rates.size(); ++process) {
    const char* const rate = GetParam().rates[process];
    std::string& clauses = job.faults.clauses.at(process);
    if (rate != nullptr) clauses.replace(0, clauses.find(';'), std::string("loss rate=") + rate);
  }
  const CapturedRun captured = captured_run(plan_of(job, choice->seed), job.processes,
                                            [&](std::size_t process) { return run_job(job, process); });
  EXPECT_TRUE(captured.result.passed) << captured.text;
}

INSTANTIATE_TEST_SUITE_P(
    Simulation, FailedOnceWithLosses,
    testing::Values(
        // A process with a failed connection ends.
        RunWithLosses{"--seed 45893 --faults loss,port/1/2/3,abort", {nullptr, nullptr, "0.01"}},
        // The peer has ended, its host acknowledges nothing, and no new side channel is answered.
        RunWithLosses{"--seed 22072 --faults loss/1,cut,abort --parts 3 --operations 16 --order 2", {"0.09"}},
        // A rank for which there is nothing to wait for closes, and one that has aborted still puts to it.
        RunWithLosses{"--seed 124532 --faults loss,abort --operations 64 --order 1", {"0.09", "0.03"}},
        // A rank has failed, and cannot say so to the third one.
        RunWithLosses{"--seed 77051 --faults loss/1/3,unanswered,abort --operations 16 --order 2",
                      {"0.06", nullptr, "0.07"}}));

}  // namespace
}  // namespace simulation
