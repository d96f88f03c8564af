#include "base/log.h"

#include <gtest/gtest.h>

#include "unit/support/log_capture.h"

namespace verbatim {
namespace {

TEST(Log, Line_ReachesSinkFormatted) {
  const LogCapture log;
  VERBATIM_WARN("device %s has %d ports", "mlx5_0", 2);
  VERBATIM_INFO("fine");
  EXPECT_EQ(log.only_warning(), "device mlx5_0 has 2 ports");
  EXPECT_EQ(log.infos(), std::vector<std::string>{"fine"});
}

TEST(Log, LongLine_IsTruncated) {
  const LogCapture log;
  VERBATIM_WARN("%s", std::string(5000, 'x').c_str());
  EXPECT_EQ(log.only_warning(), std::string(1023, 'x'));
}

TEST(Log, WithoutSink_OnlyWarningsGoToStderr) {
  set_log_sink(nullptr);
  testing::internal::CaptureStderr();
  VERBATIM_INFO("quiet");
  VERBATIM_WARN("loud");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "verbatim: loud\n");
}

}  // namespace
}  // namespace verbatim
