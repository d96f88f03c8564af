// Runs verbatim-kv as a process, and reads its report.
#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../perf/perf_run.h"

namespace verbatim::kv {

using Json = nlohmann::json;
using perf::setting;

constexpr int kOk = 0;
constexpr int kWrong = 1;
constexpr int kUsage = 2;
constexpr int kFailed = 3;
constexpr int kRejected = 5;
constexpr int kRecompute = 6;

struct KvRun {
  int status = -1;
  std::string output;
  Json report;                     // null when the run wrote none
  std::vector<Json> devices = {};  // counters of softverbs, one entry for each rank

  // The report of the family "kv" or "lf".
  const Json& family(const std::string& name) const;
  // Bytes of every queue pair that carried data, in ascending order.
  std::vector<std::uint64_t> bytes_of_queue_pairs() const;
};

// Runs over the plugin that KV_PLUGIN names, on softverbs; entries of `environment` are NAME=VALUE.
KvRun run_kv(std::vector<std::string> arguments, std::vector<std::string> environment = {});

// Expects that every request was served as planned, and that every byte was correct.
void expect_plan(const KvRun& run, const std::string& family);

}  // namespace verbatim::kv
