#include "kv_run.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

namespace verbatim::kv {
namespace {

// The directory of one run. ScratchDirectory is not used, because a test may have one itself and start several runs.
class RunDirectory {
 public:
  RunDirectory() { std::filesystem::create_directories(path_); }
  ~RunDirectory() { std::filesystem::remove_all(path_); }
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  const std::filesystem::path path_ =
      std::filesystem::path(testing::TempDir()) / ("verbatim-kv-" + std::to_string(getpid()));
};

Json parse_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  return Json::parse(file, nullptr, false);
}

}  // namespace

const Json& KvRun::family(const std::string& name) const {
  static const Json none = Json::object();
  if (!report.contains("families")) return none;
  for (const Json& family : report["families"]) {
    if (family["name"] == name) return family;
  }
  return none;
}

std::vector<std::uint64_t> KvRun::bytes_of_queue_pairs() const {
  constexpr std::uint64_t kControlBytes = 4096;  // more than the control traffic of a queue pair without data
  std::vector<std::uint64_t> bytes;
  for (const Json& device : devices) {
    for (const Json& qp : device.value("qps", Json::array())) {
      if (qp["work_requests"]["rdma_write_with_imm"] > 0 && qp["bytes"] >= kControlBytes) bytes.push_back(qp["bytes"]);
    }
  }
  std::sort(bytes.begin(), bytes.end());
  return bytes;
}

KvRun run_kv(std::vector<std::string> arguments, std::vector<std::string> environment) {
  const RunDirectory scratch;
  const std::string json = scratch.path() / "report.json";
  const auto has_option = [&](const char* option) {
    return std::find(arguments.begin(), arguments.end(), option) != arguments.end();
  };
  if (!has_option("--plugin") && !has_option("--compare"))
    arguments.insert(arguments.end(), {"--plugin", setting("KV_PLUGIN")});
  if (!has_option("--timeout")) arguments.insert(arguments.end(), {"--timeout", "100"});
  if (!has_option("--json")) arguments.insert(arguments.end(), {"--json", json});
  environment.push_back("SOFTVERBS_STATS=" + (scratch.path() / "device-%p.json").string());
  environment.push_back("VERBATIM_STATS=" + (scratch.path() / "plugin-%p.json").string());
  const perf::Outcome outcome = perf::run(arguments, environment);
  KvRun run{outcome.status, outcome.output, parse_file(json)};
  for (const auto& entry : std::filesystem::directory_iterator(scratch.path())) {
    if (entry.path().filename().string().starts_with("device-")) run.devices.push_back(parse_file(entry.path()));
  }
  return run;
}

void expect_plan(const KvRun& run, const std::string& name) {
  const Json& family = run.family(name);
  ASSERT_TRUE(family.contains("plan")) << run.output;
  const Json& plan = family["plan"];
  EXPECT_EQ(plan["requests"], family["served"]) << run.output;
  EXPECT_EQ(plan["requests"], family["notifications"]) << run.output;
  EXPECT_EQ(plan["messages"], family["sent_messages"]) << run.output;
  EXPECT_EQ(plan["messages"], family["received_messages"]) << run.output;
  EXPECT_EQ(plan["bytes"], family["sent_bytes"]) << run.output;
  EXPECT_EQ(plan["bytes"], family["served_bytes"]) << run.output;
  EXPECT_EQ(0, family["wrong_bytes"]) << run.output;
  EXPECT_EQ(0, family["crc_errors"]) << run.output;
  EXPECT_EQ(0, family["fresh_connections"]) << run.output;
  EXPECT_TRUE(family["rejected"].empty()) << run.output;
  EXPECT_TRUE(family["recompute"].empty()) << run.output;
}

}  // namespace verbatim::kv
