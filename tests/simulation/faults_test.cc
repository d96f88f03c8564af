// The faults of a run really happen, and what they do not explain is found.
#include "simulation/faults.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "simulation/captured_run.h"
#include "simulation/job.h"
#include "simulation/job_parts.h"
#include "simulation/tcp.h"

namespace simulation {
namespace {

const char* plugin() {
  return std::getenv("MUTATE_PLUGIN");
}

// Messages from one process to another one, of one port each, with the first seed from `seed` on that has them.
Job draw_messages(std::uint64_t& seed, const FaultSet& faults) {
  for (;; ++seed) {
    Job job = draw_job({.seed = seed, .faults = ChosenFaults{faults}}, plugin());
    const bool crosses = !job.connections.empty() && job.connections.front().receiver != job.connections.front().sender;
    if (job.puts.ranks == 0 && crosses && job.ports == std::vector<std::size_t>{1, 1}) return job;
  }
}

// Of two ranks.
Job draw_puts(std::uint64_t& seed, const FaultSet& faults) {
  for (;; ++seed) {
    Job job = draw_job({.seed = seed, .faults = ChosenFaults{faults}}, plugin());
    if (job.puts.ranks == 2 && job.connections.empty()) return job;
  }
}

CapturedRun run_with(const Job& job, std::uint64_t seed) {
  return captured_run(plan_of(job, seed), job.processes, [&](std::size_t process) { return run_job(job, process); });
}

// The port of the process goes down while the first messages are under way, and does not return.
Job draw_lost_port(std::uint64_t& seed, const char* library = "MUTATE_PLUGIN") {
  Job job = draw_messages(seed, {Fault::kPort});
  job.plugin = std::getenv(library);
  job.connections.front().sender = 0;
  job.connections.front().receiver = 1;
  job.connections.resize(1);
  job.faults.clauses = {"link-down device=0 after=20 op=write_imm,write", ""};
  job.faults.pauses.clear();
  job.faults.reconnect_s = 2;
  job.faults.may_end_job = true;
  ::setenv("VERBATIM_RECONNECT_S", "2", 1);
  ::setenv("VERBATIM_COMPLETION", "imm", 1);
  return job;
}

TEST(Faults, List_IsReadByName) {
  EXPECT_EQ(parse_faults("none"), ChosenFaults{});
  EXPECT_EQ(parse_faults("port,loss"), (ChosenFaults{{Fault::kLoss, Fault::kPort}, {}}));
  EXPECT_EQ(parse_faults("port/1/3,loss"), (ChosenFaults{{Fault::kLoss, Fault::kPort}, {{Fault::kPort, {1, 3}}}}));
  EXPECT_EQ(parse_faults("loss,"), std::nullopt);
  EXPECT_EQ(parse_faults("rain"), std::nullopt);
  EXPECT_EQ(parse_faults("port/x"), std::nullopt);
}

TEST(Faults, WithoutList_TheSeedChooses) {
  std::size_t without = 0;
  FaultSet met;
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    const FaultSet kinds = draw_faults(seed, {.ports = {1}}, std::nullopt).kinds;
    without += kinds.empty() ? 1U : 0U;
    met.insert(kinds.begin(), kinds.end());
  }
  EXPECT_GT(without, 10U);
  EXPECT_LT(without, 50U);
  EXPECT_EQ(met.size(), kFaultNames.size());
}

TEST(Faults, PortsOfReceivesWithOptionalCompletion_FailInManyRuns) {
  std::size_t with_port = 0;
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    with_port += draw_faults(seed, {.ports = {1}, .has_optional = true}, std::nullopt).kinds.contains(Fault::kPort);
  }
  EXPECT_GT(with_port, 30U);
}

TEST(Faults, LostPackets_AreOneIn40AtMost) {
  constexpr std::string_view kBegin = "loss rate=";
  double most = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    const std::string clause = draw_faults(seed, {.ports = {1}}, ChosenFaults{{Fault::kLoss}, {}}).clauses.front();
    ASSERT_TRUE(clause.starts_with(kBegin)) << clause;
    most = std::max(most, std::stod(clause.substr(kBegin.size())));
  }
  EXPECT_EQ(most, 0.025);
}

// How much longer the job takes when both processes have these clauses.
Time delay_by(const char* clauses, const char* timeout) {
  std::uint64_t seed = 1;
  std::array<Time, 2> ends{};
  for (const bool with : {false, true}) {
    Job job = draw_messages(seed, {Fault::kLoss});
    job.faults.clauses.assign(2, with ? clauses : "");
    ::setenv("VERBATIM_TIMEOUT", timeout, 1);
    const CapturedRun captured = run_with(job, seed);
    EXPECT_TRUE(captured.result.passed) << captured.text;
    ends.at(with ? 1 : 0) = captured.result.outcome.ended;
  }
  return ends[1] - std::min(ends[0], ends[1]);
}

TEST(Faults, LostPackets_AreWaitedFor) {
  EXPECT_GT(delay_by("loss rate=0.05", "16"), Time{4096} << 16);
}

TEST(Faults, LatePackets_AreWaitedFor) {
  EXPECT_GT(delay_by("delay by=5ms", "16"), 100 * kMillisecond);
}

TEST(Faults, VerbThatHangs_IsWaitedFor) {
  EXPECT_GT(delay_by("slow verb=create_qp by=5s nth=1 count=1", "16"), 5 * kSecond);
}

TEST(Faults, VerbThatIsRefused_EndsWhatNeedsItWithItsName) {
  std::uint64_t failed = 0;
  for (long nth = 1; nth <= 3; ++nth) {
    std::uint64_t seed = 1;
    Job job = draw_messages(seed, {Fault::kVerb});
    job.faults.verb = {.name = "ibv_modify_qp", .process = 0, .nth = nth, .error = EINVAL};
    const CapturedRun captured = run_with(job, seed);
    EXPECT_TRUE(captured.result.passed) << captured.text;
    EXPECT_EQ(fault_counts().happened[static_cast<std::size_t>(Fault::kVerb)], 1U);
    failed += fault_counts().failed_processes;
  }
  EXPECT_NE(failed, 0U);
}

// The connection goes from process 0 to process 1; a WRITE of process 0 fails.
CapturedRun run_with_failed_write(std::size_t process, const char* cause) {
  std::uint64_t seed = 1;
  Job job = draw_lost_port(seed);
  job.faults.kinds = {Fault::kQp};
  job.faults.may_end_job = false;
  job.faults.clauses = {"complete op=write_imm,write nth=20 status=REM_OP_ERR", ""};
  job.faults.qp = {.process = process, .causes = {cause}};
  return run_with(job, seed);
}

TEST(Faults, WorkRequestThatFails_IsNamedByItsProcess) {
  const CapturedRun captured = run_with_failed_write(0, "(IBV_WC_REM_OP_ERR ");
  EXPECT_TRUE(captured.result.passed) << captured.text;
  EXPECT_EQ(fault_counts().failed_processes, 2U);
  EXPECT_NE(fault_counts().happened[static_cast<std::size_t>(Fault::kQp)], 0U);
}

TEST(Faults, WorkRequestThatFailsInAnotherWay_IsFound) {
  for (const auto& [process, cause] : {std::pair(0, "(IBV_WC_GENERAL_ERR "), std::pair(1, "(IBV_WC_REM_OP_ERR ")}) {
    const CapturedRun captured = run_with_failed_write(static_cast<std::size_t>(process), cause);
    EXPECT_FALSE(captured.result.passed);
    EXPECT_NE(captured.text.find("a warning: NET/Verbatim : sending "), std::string::npos) << captured.text;
  }
}

TEST(Faults, MemoryThatIsRefused_EndsWhatNeedsItWithALine) {
  std::uint64_t failed = 0;
  for (long nth = 1; nth <= 512; nth *= 2) {
    std::uint64_t seed = 1;
    Job job = draw_messages(seed, {Fault::kMemory});
    job.faults.memory = {.process = 0, .nth = nth};
    const CapturedRun captured = run_with(job, seed);
    EXPECT_TRUE(captured.result.passed) << captured.text;
    EXPECT_EQ(fault_counts().happened[static_cast<std::size_t>(Fault::kMemory)], 1U) << nth;
    failed += fault_counts().failed_processes;
  }
  EXPECT_NE(failed, 0U);
}

TEST(Faults, MemoryThatIsRefusedUnplanned_IsFound) {
  std::uint64_t seed = 1;
  Job job = draw_messages(seed, {Fault::kMemory});
  job.faults.memory = {.process = 0, .nth = 1};
  job.faults.kinds = {Fault::kLoss};
  const CapturedRun captured = run_with(job, seed);
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("a warning: NET/Verbatim : init failed: out of memory"), std::string::npos)
      << captured.text;
}

// It is the same call on all machines.
TEST(Faults, MemoryThatIsRefused_DoesNotDependOnOtherVariables) {
  const auto run_once = [] {
    std::uint64_t seed = 1;
    Job job = draw_messages(seed, {Fault::kMemory});
    job.faults.memory = {.process = 0, .nth = 450};  // behind the settings
    return run_with(job, seed);
  };
  const CapturedRun first = run_once();
  const auto name = [](int number) { return "A_VARIABLE_OF_ANOTHER_PROGRAM_" + std::to_string(number); };
  for (int i = 0; i < 50; ++i) ::setenv(name(i).c_str(), "with a value", 1);
  const CapturedRun second = run_once();
  for (int i = 0; i < 50; ++i) ::unsetenv(name(i).c_str());
  EXPECT_EQ(fault_counts().happened[static_cast<std::size_t>(Fault::kMemory)], 1U);
  EXPECT_EQ(first.result.outcome.hash, second.result.outcome.hash) << first.text << second.text;
}

TEST(Faults, LineOfRefusedMemory_IsAllowedOnlyWhereItWasRefused) {
  std::uint64_t seed = 1;
  Job job = draw_messages(seed, {Fault::kMemory});
  job.faults.memory = {.process = 0, .nth = 1};
  const CapturedRun captured = captured_run(plan_of(job, seed), 2, [&](std::size_t process) {
    const bool before = job.faults.allow("RMA at rank 0: no memory for a lane to 1; it is tried again");
    return run_job(job, process) && !before &&
           job.faults.allow("RMA at rank 0: no memory for a lane to 1; it is tried again") == (process == 0);
  });
  EXPECT_TRUE(captured.result.passed) << captured.text;
}

TEST(Faults, PortThatDoesNotReturn_BothEndsFailWithTheCause) {
  std::uint64_t seed = 1;
  const Job job = draw_lost_port(seed);
  const CapturedRun captured = run_with(job, seed);
  EXPECT_TRUE(captured.result.passed) << captured.text;
  EXPECT_EQ(fault_counts().happened[static_cast<std::size_t>(Fault::kPort)], 1U);
  EXPECT_EQ(fault_counts().failed_processes, 2U);
}

TEST(Faults, PortThatReturns_IsUsedAgainAndMayFailAgain) {
  const Choice choice{.seed = 6, .faults = ChosenFaults{{Fault::kPort}, {}}};
  Job job = draw_job(choice, plugin());
  job.prints_log = true;
  Plan plan = plan_of(job, choice.seed);
  plan.trace = false;
  const CapturedRun captured =
      captured_run(plan, job.processes, [&](std::size_t process) { return run_job(job, process); });
  EXPECT_TRUE(captured.result.passed) << captured.text;
  const std::size_t back = captured.text.find(" is back after ");
  ASSERT_NE(back, std::string::npos) << captured.text;
  EXPECT_NE(captured.text.find("lane 1 of 1 is down", back), std::string::npos) << captured.text;
}

TEST(Faults, PortThatIsDownAtTheBegin_IsNamed) {
  std::uint64_t seed = 1;
  Job job = draw_messages(seed, {Fault::kPort});
  job.faults.clauses = {"link-down device=0 for=1s", ""};
  job.faults.may_end_job = false;
  const CapturedRun captured = run_with(job, seed);
  EXPECT_TRUE(captured.result.passed) << captured.text;
  EXPECT_EQ(fault_counts().failed_processes, 1U);
  job.faults.kinds = {Fault::kLoss};
  const CapturedRun unexplained = run_with(job, seed);
  EXPECT_FALSE(unexplained.result.passed);
  EXPECT_NE(unexplained.text.find("table init returned invalid usage"), std::string::npos) << unexplained.text;
}

// The GIDs of the receiver move or go for ever, before messages or among them.
Job draw_gid_changes(std::uint64_t& seed, const std::string& when, bool moves) {
  Job job = draw_messages(seed, {Fault::kGid});
  job.connections.resize(1);
  job.connections.front().receives_in_gpu_memory = false;
  const auto entry = [&](const char* index, const char* address, const char* type) {
    return std::string("gid device=0 index=") + index + " address=" + address + " type=" + type + " " + when;
  };
  std::string clauses = entry("2", "none", "rocev1") + "; " + entry("3", "none", "rocev2");
  if (moves) clauses += "; " + entry("6", "10.77.0.1", "rocev1") + "; " + entry("7", "10.77.0.1", "rocev2");
  job.faults.clauses.assign(2, "");
  job.faults.clauses[job.connections.front().receiver] = clauses;
  return job;
}

TEST(Faults, GidsOfAConnectionThatHasWorked_MayMoveOrGo) {
  for (const bool moves : {false, true}) {
    std::uint64_t seed = 1;
    const Job job = draw_gid_changes(seed, "after=5", moves);
    const CapturedRun captured = run_with(job, seed);
    EXPECT_TRUE(captured.result.passed) << captured.text;
    EXPECT_EQ(fault_counts().failed_processes, 0U);
    EXPECT_GE(fault_counts().happened[static_cast<std::size_t>(Fault::kGid)], 2U);
  }
}

TEST(Faults, GidsThatHaveGoneInTheSetUp_EndItWithTheCause) {
  std::uint64_t failed = 0;
  for (Time at = 50 * kMicrosecond; at < 5 * kMillisecond; at += at / 2) {
    std::uint64_t seed = 1;
    const Job job = draw_gid_changes(seed, "at=" + std::to_string(at / kMicrosecond) + "us", false);
    const CapturedRun captured = run_with(job, seed);
    EXPECT_TRUE(captured.result.passed) << captured.text;
    failed += fault_counts().failed_processes;
  }
  EXPECT_NE(failed, 0U);
}

TEST(Faults, GidChangeThatWasNotPlanned_IsFound) {
  std::uint64_t seed = 1;
  Job job = draw_gid_changes(seed, "after=5", true);
  job.faults.kinds = {Fault::kLoss};
  const CapturedRun captured = run_with(job, seed);
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find(" (GID table change); "), std::string::npos) << captured.text;
}

// The connection of a job is reset after this time. How many processes have failed calls, with the cause in the log.
std::uint64_t reset_after(Time time, std::uint64_t seed) {
  Job job = draw_messages(seed, {Fault::kReset});
  job.connections.resize(1);
  job.faults.clauses.assign(2, "delay by=1ms");
  job.faults.tcp = {};
  job.faults.tcp.add(TcpFaults::Break{.number = 1, .after = time, .resets = true});
  plan_tcp_faults(job.faults.tcp);
  const CapturedRun captured = run_with(job, seed);
  EXPECT_TRUE(captured.result.passed) << captured.text;
  return fault_counts().failed_processes;
}

TEST(Faults, ConnectionThatIsReset_EndsItsSetUpOnly) {
  std::uint64_t failed = 0;
  std::uint64_t resets = 0;
  for (std::uint64_t seed = 1; seed < 200; seed += 20) {
    failed += reset_after(50 * kMicrosecond, seed);
    EXPECT_EQ(reset_after(200 * kMillisecond, seed), 0U) << seed;
    resets += fault_counts().happened[static_cast<std::size_t>(Fault::kReset)];
  }
  EXPECT_NE(failed, 0U);
  EXPECT_NE(resets, 0U);
}

// At any step: the other end has the peer in its log, or has everything.
TEST(Faults, ProcessThatDies_TheOtherFailsWithItsName) {
  std::uint64_t failed = 0;
  for (std::uint64_t step = 64; step < 20'000; step += step / 4) {
    for (std::size_t process = 0; process < 2; ++process) {
      std::uint64_t seed = 1;
      Job job = draw_messages(seed, {Fault::kDeath});
      job.faults.dies_at = {};
      job.faults.dies_at.at(process) = step;
      const CapturedRun captured = run_with(job, seed);
      EXPECT_TRUE(captured.result.passed) << captured.text;
      failed += fault_counts().failed_processes;
    }
  }
  EXPECT_NE(failed, 0U);
}

// In the set-up, and with messages or puts under way: as with a death.
TEST(Faults, ProcessThatAborts_TheOtherEndsWithItsName) {
  std::vector<Faults::Abort> aborts;
  for (Time time = 20 * kMicrosecond; time < 300 * kMillisecond; time *= 4) aborts.push_back({.at = time});
  for (std::uint64_t done = 1; done < 100; done *= 3) aborts.push_back({.after = done});
  std::uint64_t failed = 0;
  std::uint64_t aborted = 0;
  for (const Faults::Abort& abort : aborts) {
    for (const bool has_puts : {false, true}) {
      std::uint64_t seed = 1;
      const FaultSet faults{Fault::kAbort};
      Job job = has_puts ? draw_puts(seed, faults) : draw_messages(seed, faults);
      job.faults.aborts[0] = abort;
      const CapturedRun captured = run_with(job, seed);
      EXPECT_TRUE(captured.result.passed) << captured.text;
      failed += fault_counts().failed_processes;
      aborted += fault_counts().happened[static_cast<std::size_t>(Fault::kAbort)];
    }
  }
  EXPECT_GE(failed, aborts.size());
  EXPECT_GE(aborted, aborts.size() / 2);
}

TEST(Faults, AbortThatWasNotPlanned_IsFound) {
  std::uint64_t seed = 1;
  const Job other = draw_messages(seed, {Fault::kLoss});
  Job job = other;
  job.faults.aborts[0].after = 5;
  const CapturedRun captured = captured_run(
      plan_of(job, seed), 2, [&](std::size_t process) { return run_job(process == 0 ? job : other, process); });
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find(" returned remote error ("), std::string::npos) << captured.text;
}

// The application of process 0 makes no calls for 15 s. `is_planned`: process 1 allows for it.
CapturedRun run_with_idle(bool is_planned) {
  std::uint64_t seed = 1;
  Job job = draw_messages(seed, {Fault::kIdle});
  job.faults.idle = {.process = 0, .begin = kMillisecond, .end = 15 * kSecond};
  Job unplanned = job;
  unplanned.faults.idle = {};
  ::setenv("VERBATIM_STALL_WARN_S", "5", 1);
  return captured_run(plan_of(job, seed), 2, [&](std::size_t process) {
    return run_job(process == 0 || is_planned ? job : unplanned, process);
  });
}

TEST(Faults, ApplicationThatMakesNoCalls_IsWaitedFor) {
  const CapturedRun captured = run_with_idle(true);
  EXPECT_TRUE(captured.result.passed) << captured.text;
  EXPECT_GT(captured.result.outcome.ended, 15 * kSecond);
  EXPECT_EQ(fault_counts().failed_processes, 0U);
}

TEST(Faults, WaitThatWasNotPlanned_IsFound) {
  const CapturedRun captured = run_with_idle(false);
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("a warning: NET/Verbatim : stalled for "), std::string::npos) << captured.text;
}

TEST(Faults, LineOfAPeer_IsExplainedOnlyByItsOwnDeath) {
  std::uint64_t seed = 1;
  Job job = draw_messages(seed, {Fault::kDeath});
  job.faults.dies_at = {0, 1000};
  const CapturedRun captured = captured_run(plan_of(job, seed), 2, [&](std::size_t process) {
    const bool before = job.faults.explain("the peer simulated (pid 10001) is lost");
    job.handles[process].is_there = true;
    while (process == 1 || !job.handles[1].is_there || !job.faults.has_lost(1)) ::sched_yield();
    return !before && job.faults.explain("the peer simulated (pid 10001) is lost") &&
           !job.faults.explain("the peer simulated (pid 10000) is lost");
  });
  EXPECT_TRUE(captured.result.passed) << captured.text;
}

TEST(Faults, CallFailsWhereItMayNot_IsFound) {
  std::uint64_t seed = 1;
  Job job = draw_lost_port(seed);
  job.faults.may_end_job = false;
  const CapturedRun captured = run_with(job, seed);
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find(" returned remote error (sender of connection 0)"), std::string::npos) << captured.text;
}

TEST(Faults, WarningOfAnotherFault_IsFound) {
  std::uint64_t seed = 1;
  Job job = draw_lost_port(seed);
  job.faults.kinds = {Fault::kLoss};
  const CapturedRun captured = run_with(job, seed);
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("a warning: NET/Verbatim : softverbs0:1: the link is down"), std::string::npos)
      << captured.text;
}

TEST(Faults, CallFailsWithoutALine_IsFound) {
  ::setenv("MUTATE_MODE", "error", 1);
  std::uint64_t seed = 1;
  Job job = draw_lost_port(seed, "MUTATE");
  job.faults.clauses = {"link-down device=0 at=3s", ""};  // nothing of the job is left
  const CapturedRun captured = run_with(job, seed);
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("calls have failed, and no warning names the cause"), std::string::npos)
      << captured.text;
}

}  // namespace
}  // namespace simulation
