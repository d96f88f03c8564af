#include "verbs/errors.h"

#include <gtest/gtest.h>

#include "support/log_lines.h"
#include "unit/support/log_capture.h"

namespace verbatim {
namespace {

int g_destroyed = 0;
int g_result = 0;

int destroy(ibv_pd*) {
  ++g_destroyed;
  return g_result;
}

TEST(CheckErrno, EveryReturnConvention_GivesErrno) {
  EXPECT_TRUE(check_errno("verb", 0));
  EXPECT_EQ(check_errno("verb", ENODEV).error().sys_errno, ENODEV);
  EXPECT_EQ(check_errno("verb", -ENOMEM).error().sys_errno, ENOMEM);
  errno = ETIMEDOUT;
  EXPECT_EQ(check_errno("verb", -1).error().sys_errno, ETIMEDOUT);
  EXPECT_STREQ(check_errno("verb", ENODEV).error().operation, "verb");
  EXPECT_EQ(check_errno("verb", ENODEV).error().kind, ErrorKind::kSystem);
}

TEST(Adopt, HandleGone_DestroysObject) {
  ibv_pd pd = {};
  g_destroyed = g_result = 0;
  {
    const Result<UniquePd> handle = adopt("ibv_alloc_pd", &pd, destroy);
    ASSERT_TRUE(handle);
    EXPECT_EQ(handle->get(), &pd);
    EXPECT_EQ(g_destroyed, 0);
  }
  EXPECT_EQ(g_destroyed, 1);
}

TEST(Adopt, NullObject_GivesErrno) {
  errno = EMFILE;
  const Result<UniquePd> handle = adopt<ibv_pd>("ibv_alloc_pd", nullptr, destroy);
  ASSERT_FALSE(handle);
  EXPECT_EQ(handle.error().sys_errno, EMFILE);
}

TEST(VerbsDeleter, DestroyFailsTwice_IsLogged) {
  const LogCapture log;
  ibv_device device = {};
  std::snprintf(device.name, sizeof device.name, "mlx5_0");
  ibv_context context = {};
  context.device = &device;
  ibv_pd pd = {};
  pd.context = &context;
  g_result = EBUSY;
  g_destroyed = 0;
  { const UniquePd handle(&pd, VerbsDeleter<ibv_pd>{destroy}); }
  test::expect_log_lines(log.warnings());
  EXPECT_EQ(g_destroyed, 2) << "the deleter tries twice";
}

TEST(VerbsDeleter, DestroyFailsOnce_IsRetried) {
  const LogCapture log;
  ibv_pd pd = {};
  g_destroyed = 0;
  {
    const UniquePd handle(&pd, VerbsDeleter<ibv_pd>{[](ibv_pd*) { return ++g_destroyed == 1 ? EBUSY : 0; }});
  }
  EXPECT_EQ(g_destroyed, 2);
  EXPECT_TRUE(log.warnings().empty());
}

}  // namespace
}  // namespace verbatim
