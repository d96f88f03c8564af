// Invalid settings: init must fail, with one warning that has the variable, its value and the allowed values.
#include <algorithm>
#include <sstream>

#include "conformance.h"
#include "process.h"

namespace conformance {
namespace {

class Settings : public Conformance {
 protected:
  std::vector<std::string> init_with(const std::string& variable, const std::string& value) {
    Process process("init", version(), {{variable, value}});
    const Exit end = process.wait();
    EXPECT_EQ(end.status, 0);
    std::vector<std::string> lines;
    std::istringstream text(end.output);
    for (std::string line; std::getline(text, line);) lines.push_back(line);
    return lines;
  }

  static bool succeeded(const std::vector<std::string>& lines) {
    return std::find(lines.begin(), lines.end(), "init success") != lines.end();
  }

  static std::string joined(const std::vector<std::string>& lines) {
    std::string text;
    for (const std::string& line : lines) text += line + "\n";
    return text;
  }

  void expect_refused(const std::string& variable, const std::string& value, const std::vector<std::string>& range) {
    SCOPED_TRACE(variable + "=" + value);
    const std::vector<std::string> lines = init_with(variable, value);
    EXPECT_FALSE(succeeded(lines)) << joined(lines);
    std::vector<std::string> warnings;
    for (const std::string& line : lines) {
      if (line.rfind("init ", 0) != 0) warnings.push_back(line);
    }
    ASSERT_EQ(warnings.size(), 1U) << joined(lines);
    EXPECT_NE(warnings.front().find(variable), std::string::npos) << warnings.front();
    EXPECT_NE(warnings.front().find(value), std::string::npos) << warnings.front();
    for (const std::string& word : range) {
      EXPECT_NE(warnings.front().find(word), std::string::npos) << warnings.front() << " lacks " << word;
    }
  }
};
EVERY_VERSION(Settings);

TEST_P(Settings, MaxRecvsOutOfRange_IsRejected) {
  expect_refused("VERBATIM_MAX_RECVS", "0", {"1", "8"});
  expect_refused("VERBATIM_MAX_RECVS", "9", {"1", "8"});
}

class EverySetting : public Settings {};
ONE_VERSION(EverySetting, 12);

TEST_P(EverySetting, MalformedValue_IsRejected) {
  expect_refused("VERBATIM_MAX_RECVS", "four", {"1", "8"});
  expect_refused("VERBATIM_MAX_RECVS", "4x", {"1", "8"});
  expect_refused("VERBATIM_MAX_RECVS", "-1", {"1", "8"});
  expect_refused("VERBATIM_QPS_PER_CONNECTION", "0", {"1", "128"});
  expect_refused("VERBATIM_QPS_PER_CONNECTION", "129", {"1", "128"});
  expect_refused("NCCL_IB_QPS_PER_CONNECTION", "many", {"1", "128"});
  expect_refused("VERBATIM_TC", "256", {"255"});
  expect_refused("NCCL_IB_SL", "16", {"15"});
  expect_refused("VERBATIM_TIMEOUT", "32", {"31"});
  expect_refused("VERBATIM_RETRY_CNT", "8", {"7"});
  expect_refused("VERBATIM_GID_INDEX", "softverbs0=x", {});
  expect_refused("VERBATIM_MAX_RECVS", "18446744073709551617", {"1", "8"});
}

TEST_P(EverySetting, OwnVariable_OverridesNcclAlias) {
  const auto lines = init_with("VERBATIM_QPS_PER_CONNECTION", "2");
  EXPECT_TRUE(succeeded(lines)) << joined(lines);
  Process process("init", version(), {{"VERBATIM_QPS_PER_CONNECTION", "2"}, {"NCCL_IB_QPS_PER_CONNECTION", "0"}});
  const Exit end = process.wait();
  EXPECT_NE(end.output.find("init success"), std::string::npos) << end.output;
}

TEST_P(EverySetting, VerbsLibraryMissing_IsReported) {
  const auto lines = init_with("VERBATIM_VERBS_LIBRARY", "/nonexistent/libibverbs.so.1");
  // Either init or devices may fail.
  const bool no_devices = std::any_of(lines.begin(), lines.end(), [](const std::string& line) {
    return line.rfind("devices ", 0) == 0 && line != "devices success 0" && line.rfind("devices success", 0) != 0;
  });
  EXPECT_TRUE(!succeeded(lines) || no_devices) << joined(lines);
  EXPECT_NE(joined(lines).find("/nonexistent/libibverbs.so.1"), std::string::npos) << joined(lines);
}

TEST_P(EverySetting, NoDeviceSelected_IsReported) {
  const auto lines = init_with("VERBATIM_HCA", "=no_such_device");
  const bool devices_failed = std::any_of(lines.begin(), lines.end(), [](const std::string& line) {
    return line.rfind("devices ", 0) == 0 && line.rfind("devices success", 0) != 0;
  });
  EXPECT_TRUE(!succeeded(lines) || devices_failed || joined(lines).find("devices success 0") != std::string::npos)
      << joined(lines);
  EXPECT_NE(joined(lines).find("VERBATIM_HCA"), std::string::npos) << joined(lines);
}

TEST_P(EverySetting, HcaFilter_SelectsDevices) {
  const std::string all = "devices success " + std::to_string(device_count());
  EXPECT_NE(joined(init_with("VERBATIM_HCA", "")).find(all), std::string::npos);
  const std::string first = properties(0).name.substr(std::string("verbatim_").size());
  EXPECT_NE(joined(init_with("VERBATIM_HCA", "=" + first)).find("devices success 1"), std::string::npos);
  EXPECT_NE(joined(init_with("NCCL_IB_HCA", "=" + first)).find("devices success 1"), std::string::npos);
}

}  // namespace
}  // namespace conformance
