// A run that fails becomes shorter, and stays one that fails in the same way.
#include "simulation/shrink.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <set>
#include <string>

namespace simulation {
namespace {

TEST(Choice, Text_IsReadAgain) {
  for (const char* text :
       {"--seed 7", "--seed 8 --faults none", "--seed 9 --faults loss,port/1/3 --processes 2",
        "--seed 1 --parts 0,3,puts --operations 4 --order 5", "--seed 2 --faults port --optional yes",
        "--seed 2 --optional no", "--seed 2 --devices irdma"}) {
    const std::optional<Choice> choice = parse_choice(text);
    ASSERT_TRUE(choice) << text;
    EXPECT_EQ(describe(*choice), text);
  }
}

TEST(Choice, TextThatIsWrong_IsRefused) {
  for (const char* text : {"--seed", "--seed x", "seed 7", "--faults rain", "--parts 1,", "--processes 0",
                           "--operations 0", "--optional maybe", "--devices mlx6", "--rain 1"}) {
    EXPECT_FALSE(parse_choice(text)) << text;
  }
}

TEST(Choice, LessOfAJob_LeavesTheRestAsItWas) {
  std::uint64_t seed = 1;
  const auto draw = [&](const Choice& choice) { return draw_job(choice, std::getenv("MUTATE_PLUGIN")); };
  Job whole = draw({.seed = seed});
  while (whole.processes < 3 || whole.connections.size() < 3 || whole.puts.ranks == 0) whole = draw({.seed = ++seed});
  const Job part = draw({.seed = seed, .processes = 2, .parts = std::set{std::size_t{1}, kPutsPart}, .operations = 5});
  EXPECT_EQ(part.processes, 2U);
  for (const ConnectionPlan& plan : part.connections) {
    EXPECT_EQ(plan.number, 1U);
    EXPECT_EQ(plan.groups.size(), 5U);
    EXPECT_EQ(plan.groups.front().sizes, whole.connections[1].groups.front().sizes);
  }
  std::size_t kept = 0;
  for (const Operation& operation : part.puts.operations) {
    EXPECT_LT(operation.rank, 2U);
    EXPECT_LT(operation.peer, 2U);
    kept += operation.is_last ? 0U : 1U;
  }
  EXPECT_LE(kept, 2 * 5 * whole.puts.contexts.size());
  EXPECT_LT(part.puts.operations.size(), whole.puts.operations.size());
}

TEST(Choice, OtherOrder_IsAnotherRunOfTheSameJob) {
  const Choice choice{.seed = 3, .faults = ChosenFaults{}};
  Choice reordered = choice;
  reordered.order = 1;
  const Tried first = try_run(choice, std::getenv("MUTATE_PLUGIN"));
  const Tried second = try_run(reordered, std::getenv("MUTATE_PLUGIN"));
  EXPECT_TRUE(first.result.passed && second.result.passed) << first.text << second.text;
  EXPECT_NE(first.result.outcome.hash, second.result.outcome.hash);
  EXPECT_EQ(first.job.connections.size(), second.job.connections.size());
}

TEST(KindOfFailure, Line_IsWithoutNumbersAndNames) {
  EXPECT_EQ(kind_of_failure("softverbs: QP 12 cannot reach\n  process 1, thread 3 waits in poll\n"
                            "seed 12: the job of process 0 has failed\nwrong bytes: 17 in group 3 (receiver of "
                            "connection 2)\nleak: 2 threads have not ended\n"),
            "wrong bytes: # in group #");
  EXPECT_EQ(kind_of_failure("seed 12 at 43.210 us: deadlock: every thread waits, and none has a deadline\n"),
            "deadlock: every thread waits, and none has a deadline");
  EXPECT_EQ(kind_of_failure(""), "");
}

// A job of four processes with two connections and puts. It fails as `fails` says, without a run.
template <typename Fails>
std::optional<Shorter> shrink_job(Fails fails) {
  const auto run = [&](const Choice& choice) {
    Tried tried;
    Job& job = tried.job;
    job.processes = std::min(choice.processes, std::size_t{4});
    for (std::size_t i = 0; i < 2; ++i) {
      if (choice.parts && !choice.parts->contains(i)) continue;
      job.connections.push_back(
          {.number = i, .groups = std::vector<Group>(std::min(choice.operations, std::size_t{24}))});
    }
    if (!choice.parts || choice.parts->contains(kPutsPart)) job.puts.ranks = job.processes;
    job.faults.kinds = choice.faults ? choice.faults->kinds : FaultSet{Fault::kLoss, Fault::kPort};
    job.faults.events = {{Fault::kLoss, 4}, {Fault::kPort, 3}};
    job.has_optional = choice.has_optional.value_or(!choice.faults);
    job.devices = choice.devices.value_or(choice.faults ? "standard" : "irdma");
    tried.text = fails(choice, job);
    tried.result.passed = tried.text.empty();
    return tried;
  };
  return shrink({.seed = 5}, run);
}

bool has_event(const Choice& choice, const Job& job, Fault fault, std::size_t number) {
  if (!job.faults.kinds.contains(fault)) return false;
  if (!choice.faults) return true;
  const auto chosen = choice.faults->events.find(fault);
  return chosen == choice.faults->events.end() || chosen->second.contains(number);
}

TEST(Shrink, OnlyWhatIsNeeded_IsLeft) {
  const std::optional<Shorter> shorter = shrink_job([](const Choice& choice, const Job& job) {
    const bool fails = has_event(choice, job, Fault::kPort, 2) && job.processes > 2 && !job.connections.empty() &&
                       job.connections.back().number == 1 && job.connections.back().groups.size() > 6;
    return fails ? "signal lost" : "";
  });
  ASSERT_TRUE(shorter);
  EXPECT_EQ(describe(shorter->choice), "--seed 5 --faults port/2 --processes 3 --parts 1 --operations 8");
}

TEST(Shrink, OptionalCompletionThatIsNeeded_Stays) {
  const std::optional<Shorter> shorter =
      shrink_job([](const Choice&, const Job& job) { return job.has_optional ? "signal lost" : ""; });
  ASSERT_TRUE(shorter);
  EXPECT_EQ(describe(shorter->choice), "--seed 5 --faults none --processes 1 --parts 0 --operations 1 --optional yes");
}

TEST(Shrink, DevicesThatAreNeeded_Stay) {
  const std::optional<Shorter> shorter =
      shrink_job([](const Choice&, const Job& job) { return job.devices == "irdma" ? "signal lost" : ""; });
  ASSERT_TRUE(shorter);
  EXPECT_EQ(describe(shorter->choice), "--seed 5 --faults none --processes 1 --parts 0 --operations 1 --devices irdma");
}

TEST(Shrink, FailureOfAnotherKind_IsNotTaken) {
  const std::optional<Shorter> shorter = shrink_job([](const Choice& choice, const Job& job) {
    return has_event(choice, job, Fault::kLoss, 1) && job.processes == 4 ? "signal lost" : "a warning: 17";
  });
  ASSERT_TRUE(shorter);
  EXPECT_EQ(describe(shorter->choice), "--seed 5 --faults loss/1 --parts 0 --operations 1");
}

TEST(Shrink, OrderThatFailsAgain_IsLookedFor) {
  const std::optional<Shorter> shorter = shrink_job([](const Choice& choice, const Job& job) {
    return choice.order == (job.faults.kinds.empty() ? 2 : 0) ? "signal lost" : "";
  });
  ASSERT_TRUE(shorter);
  EXPECT_EQ(shorter->choice.order, 2U);
  EXPECT_EQ(shorter->choice.faults, ChosenFaults{});
}

TEST(Shrink, RunThatPasses_IsLeftAlone) {
  EXPECT_FALSE(shrink_job([](const Choice&, const Job&) { return ""; }));
}

// With a plugin that does wrong.
TEST(Shrink, FailingRun_BecomesAShorterOneThatFails) {
  ::setenv("MUTATE_MODE", "flip-byte", 1);
  const auto run = [](const Choice& choice) { return try_run(choice, std::getenv("MUTATE")); };
  Choice choice;
  Job job = draw_job(choice, std::getenv("MUTATE"));
  while (job.puts.ranks != 0 || job.processes < 2 || job.connections.size() < 2 || job.faults.kinds.size() < 2) {
    ++choice.seed;
    job = draw_job(choice, std::getenv("MUTATE"));
  }
  const std::optional<Shorter> shorter = shrink(choice, run);
  ASSERT_TRUE(shorter);
  EXPECT_EQ(kind_of_failure(shorter->tried.text), "wrong bytes: # in group #");
  EXPECT_EQ(shorter->choice.faults, ChosenFaults{});
  EXPECT_EQ(shorter->tried.job.connections.size(), 1U);
  EXPECT_EQ(shorter->tried.job.connections.front().groups.size(), 1U);
  const std::optional<Choice> again = parse_choice(describe(shorter->choice));
  ASSERT_TRUE(again);
  const Tried repeated = run(*again);
  EXPECT_FALSE(repeated.result.passed);
  EXPECT_EQ(repeated.result.outcome.hash, shorter->tried.result.outcome.hash);
}

}  // namespace
}  // namespace simulation
