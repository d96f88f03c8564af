// Runs verbatim-kv as a user does, and reads its report.
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
  Json report;                     // null when there is none
  std::vector<Json> devices = {};  // softverbs' counters, one a rank

  // "kv" or "lf".
  const Json& family(const std::string& name) const;
  // Bytes of every queue pair that carried data, in ascending order.
  std::vector<std::uint64_t> bytes_of_queue_pairs() const;
};

// Over the plugin that KV_PLUGIN names, on softverbs; `environment` is NAME=VALUE.
KvRun run_kv(std::vector<std::string> arguments, std::vector<std::string> environment = {});

// Every request was served as planned, and every byte was right.
void expect_plan(const KvRun& run, const std::string& family);

}  // namespace verbatim::kv
