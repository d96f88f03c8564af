// Failures and log lines of a child process with faults of softverbs, in a form that can be compared.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <regex>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "net/transfer/comm.h"
#include "support/child.h"
#include "support/normalized_line.h"

namespace verbatim {

using Lines = std::vector<std::string>;

// The warnings that a child has written, normalized.
inline Lines warnings_of(const std::string& warnings) {
  Lines lines;
  std::istringstream text(warnings);
  for (std::string line; std::getline(text, line);) {
    constexpr std::string_view kMark = "verbatim: ";
    // The monitor may log events of a device or port at any time.
    static const std::regex of_event(std::string(kMark) + "softverbs[0-9](:[0-9]|: the device ).*");
    if (line.starts_with(kMark) && !std::regex_match(line, of_event))
      lines.push_back(normalized(line.substr(kMark.size())));
  }
  return lines;
}

inline test::Variables with_faults(const std::string& faults) {
  return {{"SOFTVERBS_FAULTS", faults}, {"SOFTVERBS_ENGINE", "inline"}, {"SOFTVERBS_DEVICES", "2"},
          {"SOFTVERBS_VENDOR_ID", "0"}, {"VERBATIM_TIMEOUT", "8"},      {"VERBATIM_RETRY_CNT", "2"},
          {"VERBATIM_RECONNECT_S", "0"}};
}

inline const std::string kEnds =
    "HOST softverbs0:1 GID 3 ::ffff:10.77.0.1 QP # to HOST softverbs0:1 GID 3 ::ffff:10.77.0.1 QP #, MTU 4096, TC 0, "
    "SL 0";

struct ExpectedFailure {
  ErrorKind kind;
  std::string what;
  std::string why;
  std::string next;
  std::uint64_t messages = 0;  // completed
  std::uint64_t bytes = 0;
};

// The fields of a failure between the first ports of both ends, normalized.
inline void expect_failure(const Comm& comm, const ExpectedFailure& expected) {
  const Failure* const failure = comm.failure();
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, expected.kind);
  EXPECT_EQ(normalized(failure->what), expected.what);
  EXPECT_EQ(normalized(failure->diagnosis.why), expected.why);
  EXPECT_EQ(normalized(failure->diagnosis.next), expected.next);
  ASSERT_TRUE(failure->path);
  EXPECT_EQ(normalized(describe_path(*failure->path)), kEnds);
  EXPECT_EQ(failure->path->completed_counts.messages, expected.messages);
  EXPECT_EQ(failure->path->completed_counts.bytes, expected.bytes);
}

}  // namespace verbatim
