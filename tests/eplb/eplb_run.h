// Runs verbatim-eplb over the plugin that EPLB_PLUGIN names.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "perf/perf_run.h"

namespace verbatim::eplb {

using perf::Outcome;
using perf::setting;

constexpr int kCorrect = 0;
constexpr int kWrong = 1;
constexpr int kUsage = 2;
constexpr int kFailed = 3;
constexpr int kTimeout = 4;

inline Outcome run(std::vector<std::string> arguments) {
  return perf::PerfProcess(arguments, {}, "VERBATIM_EPLB").finish();
}

inline Outcome run_over_plugin(std::vector<std::string> arguments) {
  arguments.insert(arguments.end(), {"--plugin", setting("EPLB_PLUGIN"), "--timeout", "100"});
  return run(arguments);
}

inline bool contains(const Outcome& outcome, const std::string& text) {
  return outcome.output.find(text) != std::string::npos;
}

}  // namespace verbatim::eplb
