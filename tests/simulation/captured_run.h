// A run whose lines on stderr a test reads.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <string>

#include "simulation/run.h"

namespace simulation {

struct CapturedRun {
  Result result;
  std::string text;
};

inline CapturedRun captured_run(const Plan& plan, std::size_t processes, const std::function<bool(std::size_t)>& job) {
  testing::internal::CaptureStderr();
  const Result result = run(plan, processes, job);
  return {result, testing::internal::GetCapturedStderr()};
}

inline CapturedRun captured_run(const Plan& plan, const std::function<bool()>& job) {
  return captured_run(plan, 1, [&job](std::size_t) { return job(); });
}

}  // namespace simulation
