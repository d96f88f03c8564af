#include "failure_sweep.h"

#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "conformance.h"
#include "lifecycle/process_resources.h"
#include "system_calls.h"

namespace fault {
namespace {

using conformance::ProcessResources;
using conformance::verbs_alive;
using verbatim::test::FailNth;

// Memory that the C library may keep for names, streams and threads.
constexpr std::size_t kKeptHeap = 64 << 10;

bool signals_are_blocked() {
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  return sigismember(&blocked, SIGTERM) == 1;
}

}  // namespace

bool names(const std::vector<std::string>& warnings, const Call& call) {
  for (const std::string& line : warnings) {
    if (line.find(call.name) != std::string::npos) return true;
    if (call.named != nullptr && line.find(call.named) != std::string::npos) return true;
  }
  return false;
}

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text.append("\n  ").append(line);
  return text;
}

void Sweep::sweep(FailNth& fail, const std::vector<Call>& calls) {
  const LifetimeResult first = run({});
  ASSERT_EQ(first.failed + first.violation, "") << join(first.warnings);
  ASSERT_EQ(verbs_alive(), "");
  run({});
  const ProcessResources before = ProcessResources::take();
  long all = 0;
  long errors = 0;
  for (const Call& call : calls) {
    for (const int error : call.errors) {
      long runs = 0;
      long failed = 0;
      for (long nth = 1; nth <= call.at_most && run_with_failure(fail, call, error, nth, failed); nth += step_) {
        ASSERT_LT(++runs, kMaxCalls) << call.name;
      }
      std::printf("%s with %s: %ld runs, %ld with an error\n", call.name, strerrorname_np(error), runs, failed);
      EXPECT_TRUE(runs > 0 || !expect_each_call_) << call.name;
      all += runs;
      errors += failed;
    }
  }
  std::printf("%ld runs with one failed call each: %ld returned an error, %ld succeeded\n", all, errors, all - errors);
  EXPECT_GT(all, 0);
  EXPECT_TRUE(conformance::is_restored(before, kKeptHeap));
}

// Runs the lifetime in which the `nth` of these calls fails; false when there are fewer calls.
bool Sweep::run_with_failure(FailNth& fail, const Call& call, int error, long nth, long& failed) {
  SCOPED_TRACE(std::string(call.name) + " number " + std::to_string(nth) + " with " + strerrorname_np(error));
  const ProcessResources before = ProcessResources::take();
  const LifetimeResult outcome = run({.loaded =
                                          [&] {
                                            watch_library(conformance::options().plugin);
                                            fail.arm(call.name, nth, error);
                                          },
                                      .unloaded =
                                          [&] {
                                            fail.disarm();
                                            watch_nothing();
                                          }});
  const std::string log = outcome.failed + join(outcome.warnings);
  EXPECT_EQ(outcome.violation, "") << log;
  EXPECT_EQ(verbs_alive(), "") << log;
  EXPECT_EQ(files_left(call), "") << log;
  EXPECT_TRUE(conformance::is_restored(before, std::size_t{1} << 30)) << log;
  EXPECT_FALSE(signals_are_blocked());
  expect_lines(outcome, call, log);
  if (!fail.has_failed()) {
    EXPECT_EQ(log, "") << "although no call failed";
    return false;
  }
  if (!outcome.failed.empty()) ++failed;
  const LifetimeResult after = run({});
  EXPECT_EQ(after.failed + after.violation + join(after.warnings), "") << "in the next lifetime: " << log;
  return true;
}

}  // namespace fault
