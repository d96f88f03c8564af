// Runs verbatim-eplb over the plugin that EPLB_PLUGIN names.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "perf/perf_run.h"

namespace verbatim::eplb {

using perf::kCorrect;
using perf::kFailed;
using perf::kTimeout;
using perf::kUsage;
using perf::kWrong;
using perf::Outcome;
using perf::setting;

inline Outcome run(std::vector<std::string> arguments) {
  return perf::PerfProcess(arguments, {}, "EPLB_TOOL").finish();
}

inline Outcome run_over_plugin(std::vector<std::string> arguments) {
  arguments.insert(arguments.end(), {"--plugin", setting("EPLB_PLUGIN"), "--timeout", "100"});
  return run(arguments);
}

inline bool contains(const Outcome& outcome, const std::string& text) {
  return outcome.output.find(text) != std::string::npos;
}

}  // namespace verbatim::eplb
