// Parts of softverbs that need no device.
//: program softverbs_parts_test link=base,verbs_headers,gtest
//:   + sources=support/child.cc,src/softverbs/engine/qp_transitions.cc,src/softverbs/fabric/paths.cc
//:   + sources=src/softverbs/host/fault_script.cc,src/softverbs/host/settings.cc,src/softverbs/host/shm_file.cc
//:   + sources=src/softverbs/host/stats.cc
//: test softverbs-parts

// The parser of SOFTVERBS_* variables: values and defaults; a malformed value is named on stderr and gives no settings.
#include "softverbs/host/settings.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>

#include "support/child.h"

namespace verbatim::softverbs {
namespace {

// Runs `check` in a child process, because a process reads its settings once. The return value is the exit status.
test::ChildResult in_child(const char* name, const std::string& value,
                           const std::function<int(const Settings*)>& check) {
  return test::run_in_child({{name, value}}, [&] { return check(settings()); });
}

class SettingsParser : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"SOFTVERBS_DEVICES", "SOFTVERBS_ENGINE", "SOFTVERBS_LINK_LAYER", "SOFTVERBS_NAMESPACE",
                             "SOFTVERBS_LOCK_LIMIT", "SOFTVERBS_ATOMICS", "SOFTVERBS_PROFILE"}) {
      unsetenv(name);
    }
  }
};

void expect_refused(const char* name, const std::string& value) {
  SCOPED_TRACE(std::string(name) + "=" + value);
  const test::ChildResult result =
      in_child(name, value, [](const Settings* settings) { return settings == nullptr ? 0 : 1; });
  EXPECT_EQ(result.status, 0);
  EXPECT_NE(result.stderr_text.find(name), std::string::npos) << result.stderr_text;
  EXPECT_EQ(std::count(result.stderr_text.begin(), result.stderr_text.end(), '\n'), 1) << result.stderr_text;
}

void expect_accepted(const char* name, const std::string& value, const std::function<bool(const Settings&)>& check) {
  SCOPED_TRACE(std::string(name) + "=" + value);
  const test::ChildResult result =
      in_child(name, value, [&](const Settings* settings) { return settings != nullptr && check(*settings) ? 0 : 1; });
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(result.stderr_text, "");
}

TEST_F(SettingsParser, UnsetVariables_GiveDefaults) {
  expect_accepted("SOFTVERBS_DEVICES", "", [](const Settings& s) {
    return s.devices == 1 && s.threaded && s.ethernet && s.mtu_bytes == 4096 && s.name_space.empty() &&
           s.vendor_id != 0 && s.has_lock_limit && s.late_host_ms == 0 && s.late_gpu_ms == 0;
  });
}

TEST_F(SettingsParser, ValidValues_AreAccepted) {
  expect_accepted("SOFTVERBS_DEVICES", "0", [](const Settings& s) { return s.devices == 0; });
  expect_accepted("SOFTVERBS_DEVICES", "16", [](const Settings& s) { return s.devices == 16; });
  expect_accepted("SOFTVERBS_ENGINE", "inline", [](const Settings& s) { return !s.threaded; });
  expect_accepted("SOFTVERBS_LINK_LAYER", "ib", [](const Settings& s) { return !s.ethernet; });
  expect_accepted("SOFTVERBS_MTU", "1024", [](const Settings& s) { return s.mtu_bytes == 1024; });
  expect_accepted("SOFTVERBS_SPEED_GBPS", "400",
                  [](const Settings& s) { return s.speed_gbps == for_all_devices(400); });
  expect_accepted("SOFTVERBS_MAX_QP", "7", [](const Settings& s) { return s.max_qp == 7; });
  expect_accepted("SOFTVERBS_MAX_MSG_SZ", "2147483648", [](const Settings& s) { return s.max_msg_bytes == 1U << 31; });
  expect_accepted("SOFTVERBS_DMABUF", "", [](const Settings& s) { return !s.dmabuf; });
  expect_accepted("SOFTVERBS_DMABUF", "1", [](const Settings& s) { return s.dmabuf; });
  expect_accepted("SOFTVERBS_STATS", "/tmp/%p.json", [](const Settings& s) { return s.stats_file == "/tmp/%p.json"; });
  expect_accepted("SOFTVERBS_VENDOR_ID", "713", [](const Settings& s) { return s.vendor_id == 713; });
  expect_accepted("SOFTVERBS_VENDOR_ID", "0x15b3", [](const Settings& s) { return s.vendor_id == 0x15b3; });
  expect_accepted("SOFTVERBS_VENDOR_PART_ID", "4119", [](const Settings& s) { return s.vendor_part_id == 4119; });
  expect_accepted("SOFTVERBS_VENDOR_PART_ID", "0XfFf", [](const Settings& s) { return s.vendor_part_id == 0xfff; });
  expect_accepted("SOFTVERBS_ATOMICS", "glob", [](const Settings& s) { return s.atomics == Atomics::kGlob; });
  expect_accepted("SOFTVERBS_LOCK_LIMIT", "kernel", [](const Settings& s) { return s.has_lock_limit; });
  expect_accepted("SOFTVERBS_LOCK_LIMIT", "none", [](const Settings& s) { return !s.has_lock_limit; });
  expect_accepted("SOFTVERBS_DIRECTORY", "/tmp", [](const Settings& s) { return s.directory == "/tmp"; });
  expect_accepted("SOFTVERBS_DIRECTORY", "", [](const Settings& s) { return s.directory.empty(); });
  expect_accepted("SOFTVERBS_NAMESPACE", "Job_1-a", [](const Settings& s) { return s.name_space == "Job_1-a"; });
}

TEST_F(SettingsParser, PciAddresses_AreParsed) {
  expect_accepted("SOFTVERBS_PCI", "", [](const Settings& s) { return s.pci.empty(); });
  expect_accepted("SOFTVERBS_PCI", "0000:3B:00.0,0000:3b:1f.7", [](const Settings& s) {
    return s.pci == std::vector<std::string>{"0000:3b:00.0", "0000:3b:1f.7"};
  });
  for (const char* value : {"3b:00.0", ",0000:3b:00.0", "0000:3b:00.0,0000:3b:00", "0000:3g:00.0", "0000/3b:00.0"}) {
    expect_refused("SOFTVERBS_PCI", value);
    expect_refused("SOFTVERBS_DATA_DIRECT", value);
  }
  expect_accepted("SOFTVERBS_DATA_DIRECT", "0000:C1:00.0",
                  [](const Settings& s) { return s.data_direct == std::vector<std::string>{"0000:c1:00.0"}; });
}

TEST_F(SettingsParser, MalformedNumber_IsRefused) {
  for (const char* value : {"17", "-1", "+1", " 1", "1 ", "0x1", "1.5", "two", "99999999999999999999"}) {
    expect_refused("SOFTVERBS_DEVICES", value);
  }
  expect_refused("SOFTVERBS_MAX_SGE", "0");
  expect_refused("SOFTVERBS_MAX_SGE", "33");
  expect_refused("SOFTVERBS_MAX_MSG_SZ", "2147483649");
  for (const char* value : {"16777216", "0x1000000", "0x", "15b3", "0x15b3 ", "0x-1", "00x1"}) {
    expect_refused("SOFTVERBS_VENDOR_ID", value);
  }
  expect_refused("SOFTVERBS_DMABUF", "yes");
  expect_refused("SOFTVERBS_MTU", "1500");
  expect_refused("SOFTVERBS_SPEED_GBPS", "99");
}

TEST_F(SettingsParser, ListOfNumbers_GivesTheLastOneToFurtherDevices) {
  PerDevice numbers = for_all_devices(25);
  numbers[0] = 100;
  numbers[1] = 10;
  expect_accepted("SOFTVERBS_LINK_GBPS", "100,10,25",
                  [&](const Settings& s) { return s.link_gbps == numbers && s.has_rate(); });
  expect_accepted("SOFTVERBS_SPEED_GBPS", "100,10,25", [&](const Settings& s) { return s.speed_gbps == numbers; });
  expect_accepted("SOFTVERBS_LINK_GBPS", "", [](const Settings& s) { return !s.has_rate(); });
  expect_accepted("SOFTVERBS_LINK_GBPS", "0,0", [](const Settings& s) { return !s.has_rate(); });
  // As in other lists, what is for devices that do not exist has no effect.
  std::string long_list = "10000";
  for (std::uint32_t i = 1; i < kMaxDevices; ++i) long_list += ",10000";
  expect_accepted("SOFTVERBS_LINK_GBPS", long_list + ",1",
                  [](const Settings& s) { return s.link_gbps == for_all_devices(10000); });
  for (const char* value : {"100,", ",100", "100,,25", "100, 25", "100;25", "100,10001", "10001,100", "100,-1", ","}) {
    expect_refused("SOFTVERBS_LINK_GBPS", value);
  }
  for (const char* value : {"100,0", "0,100", "100,0,25"}) expect_refused("SOFTVERBS_LINK_GBPS", value);
  for (const char* value : {"100,26", "0", "0,100", "100,", "100,25,x"}) expect_refused("SOFTVERBS_SPEED_GBPS", value);
}

TEST_F(SettingsParser, Profile_SetsWhatOtherVariablesOverride) {
  expect_accepted("SOFTVERBS_PROFILE", "irdma", [](const Settings& s) { return s.first_sge && !s.reuses_qps; });
  for (const char* name : {"", "standard", "mlx5", "bnxt_re"}) {
    expect_accepted("SOFTVERBS_PROFILE", name, [](const Settings& s) { return !s.first_sge && s.reuses_qps; });
  }
  setenv("SOFTVERBS_EMPTY_WRITE", "empty", 1);
  expect_accepted("SOFTVERBS_PROFILE", "irdma", [](const Settings& s) { return !s.first_sge && !s.reuses_qps; });
  unsetenv("SOFTVERBS_EMPTY_WRITE");
}

TEST_F(SettingsParser, BehaviourOfDrivers_HasSettings) {
  expect_accepted("SOFTVERBS_PROFILE", "standard", [](const Settings& s) {
    return s.reuses_qps && s.rq_psn == RqPsn::kExact && !s.retry_event && !s.flushes_late && s.has_gpu_atomics &&
           !s.renumbers_gids && s.atomics == Atomics::kHca && s.late_gpu_ms == 0;
  });
  expect_accepted("SOFTVERBS_PROFILE", "mlx5", [](const Settings& s) {
    return s.rq_psn == RqPsn::kAccepted && !s.retry_event && !s.flushes_late && s.has_gpu_atomics && s.renumbers_gids &&
           s.atomics == Atomics::kDevice && s.late_gpu_ms == 2 && s.late_host_ms == 2;
  });
  expect_accepted("SOFTVERBS_PROFILE", "bnxt_re", [](const Settings& s) {
    return s.rq_psn == RqPsn::kZero && s.retry_event && s.flushes_late && !s.has_gpu_atomics && s.renumbers_gids &&
           s.atomics == Atomics::kGlob && s.late_gpu_ms == 2 && s.late_host_ms == 2;
  });
  expect_accepted("SOFTVERBS_PROFILE", "irdma", [](const Settings& s) {
    return s.rq_psn == RqPsn::kSet && s.retry_event && s.flushes_late && s.has_gpu_atomics && s.renumbers_gids &&
           s.atomics == Atomics::kDevice && s.late_gpu_ms == 2 && s.late_host_ms == 2;
  });
  expect_accepted("SOFTVERBS_QP_REUSE", "refused", [](const Settings& s) { return !s.reuses_qps; });
  expect_accepted("SOFTVERBS_RQ_PSN", "cached", [](const Settings& s) { return s.rq_psn == RqPsn::kCached; });
  expect_accepted("SOFTVERBS_RETRY_EVENT", "access-after", [](const Settings& s) {
    return s.retry_event && s.retry_event->type == IBV_EVENT_QP_ACCESS_ERR && !s.retry_event->is_first;
  });
  expect_accepted("SOFTVERBS_RETRY_EVENT", "none", [](const Settings& s) { return !s.retry_event; });
  expect_accepted("SOFTVERBS_FLUSH", "late", [](const Settings& s) { return s.flushes_late; });
  expect_accepted("SOFTVERBS_GPU_ATOMICS", "refused", [](const Settings& s) { return !s.has_gpu_atomics; });
  expect_accepted("SOFTVERBS_GID_TABLE", "renumbered", [](const Settings& s) { return s.renumbers_gids; });
  expect_accepted("SOFTVERBS_ATOMICS", "device", [](const Settings& s) { return s.atomics == Atomics::kDevice; });
  expect_accepted("SOFTVERBS_LATE_HOST_MS", "2",
                  [](const Settings& s) { return s.late_host_ms == 2 && s.late_gpu_ms == 0; });
  expect_accepted("SOFTVERBS_LATE_GPU_MS", "3600000", [](const Settings& s) { return s.late_gpu_ms == 3'600'000; });
  for (const char* name : {"SOFTVERBS_LATE_HOST_MS", "SOFTVERBS_LATE_GPU_MS"}) expect_refused(name, "3600001");
  for (const char* name : {"SOFTVERBS_QP_REUSE", "SOFTVERBS_RQ_PSN", "SOFTVERBS_RETRY_EVENT", "SOFTVERBS_FLUSH",
                           "SOFTVERBS_GPU_ATOMICS", "SOFTVERBS_GID_TABLE", "SOFTVERBS_ATOMICS"}) {
    expect_refused(name, "other");
  }
}

TEST_F(SettingsParser, UnknownChoice_IsRefused) {
  for (const char* value : {"mlx4", "MLX5", "mlx5 ", "mlx5,irdma"}) expect_refused("SOFTVERBS_PROFILE", value);
  expect_refused("SOFTVERBS_GPU_MEMORY", "all");
  expect_refused("SOFTVERBS_ENGINE", "Thread");
  expect_refused("SOFTVERBS_LINK_LAYER", "iwarp");
}

TEST_F(SettingsParser, NamespaceWithOtherCharacters_IsRefused) {
  for (const std::string& value : {std::string("a/b"), std::string(".."), std::string("a b"), std::string(65, 'x')}) {
    expect_refused("SOFTVERBS_NAMESPACE", value);
  }
}

TEST_F(SettingsParser, DirectoryThatCannotBeUsed_IsRefused) {
  for (const char* value : {"tmp", "/no/such/directory", "/proc/self/exe"})
    expect_refused("SOFTVERBS_DIRECTORY", value);
}

TEST_F(SettingsParser, OrderingRateAndThreads_AreParsed) {
  expect_accepted("SOFTVERBS_ORDERING", "adaptive-routing", [](const Settings& all) { return all.adaptive_routing; });
  expect_accepted("SOFTVERBS_ORDERING", "in-order", [](const Settings& all) { return !all.adaptive_routing; });
  expect_refused("SOFTVERBS_ORDERING", "random");
  expect_accepted("SOFTVERBS_ARBITRATION", "arrival", [](const Settings& all) { return all.by_arrival; });
  expect_refused("SOFTVERBS_ARBITRATION", "fair");
  expect_accepted("SOFTVERBS_LINK_GBPS", "400",
                  [](const Settings& all) { return all.link_gbps == for_all_devices(400); });
  expect_accepted("SOFTVERBS_QUANTUM", "8192", [](const Settings& all) { return all.quantum_bytes == 8192; });
  expect_refused("SOFTVERBS_QUANTUM", "10000");
  expect_accepted("SOFTVERBS_PATHS", "64", [](const Settings& all) { return all.paths == 64; });
  for (const char* value : {"0", "65", "4,4"}) expect_refused("SOFTVERBS_PATHS", value);
  expect_accepted("SOFTVERBS_ENGINES", "4", [](const Settings& all) { return all.engines == 4; });
  expect_refused("SOFTVERBS_ENGINES", "0");
  expect_accepted("SOFTVERBS_CROSS_MEMORY", "forbidden", [](const Settings& all) { return all.forbid_cross_memory; });
  setenv("SOFTVERBS_ENGINE", "inline", 1);
  expect_refused("SOFTVERBS_LINK_GBPS", "100");  // needs a thread
  expect_refused("SOFTVERBS_LINK_GBPS", "100,25");
}

}  // namespace
}  // namespace verbatim::softverbs
