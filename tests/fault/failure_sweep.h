// Failure sweep: for every call of a verb, a system call or an allocation in one lifetime of the plugin, a lifetime in
// which exactly this call fails. Each such lifetime must end with success, or with an error that the log explains; it
// must leak nothing, and the next lifetime must work.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lifetime.h"
#include "support/fail_nth.h"

namespace fault {

// Upper limit for the calls of one function in a lifetime; a sweep that reaches it does not end.
constexpr long kMaxCalls = 20'000;

struct Call {
  const char* name;
  std::vector<int> errors;
  // A text that a warning may contain in place of the function's name.
  const char* named = nullptr;
  // Of a function that is called until something has happened: how many of its calls fail, one in each lifetime.
  long at_most = kMaxCalls;
};

// Whether a warning names the call.
bool names(const std::vector<std::string>& warnings, const Call& call);
// Each on a line of its own.
std::string join(const std::vector<std::string>& lines);

class Sweep : public ::testing::Test {
 protected:
  void sweep(verbatim::test::FailNth& fail, const std::vector<Call>& calls);

  virtual LifetimeResult run(const Hooks& hooks) = 0;
  virtual void expect_lines(const LifetimeResult& outcome, const Call& call, const std::string& log) = 0;
  // Names of files that remain after a lifetime in which this call failed, and should not.
  virtual std::string files_left(const Call&) { return ""; }

  bool expect_each_call_ = false;  // whether every listed function must be called in a lifetime
  long step_ = 1;                  // 2: of the calls of a function, only the first, third, fifth ... fail

 private:
  bool run_with_failure(verbatim::test::FailNth& fail, const Call& call, int error, long nth, long& failed);
};

}  // namespace fault
