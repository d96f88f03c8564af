#include "verbs/mlx5.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "support/log_capture.h"

namespace verbatim {
namespace {

TEST(Mlx5, NamedLibraryAnswersNo_IsNotSupported) {
  const std::optional<Mlx5> mlx5 = Mlx5::load(FAKE_MLX5_NO);
  ASSERT_TRUE(mlx5);
  EXPECT_FALSE(mlx5->is_supported(nullptr));
}

TEST(Mlx5, NamedLibraryAnswersYes_IsSupported) {
  const std::optional<Mlx5> mlx5 = Mlx5::load(FAKE_MLX5_YES);
  ASSERT_TRUE(mlx5);
  EXPECT_TRUE(mlx5->is_supported(nullptr));
}

TEST(Mlx5, NamedLibraryMissing_GivesOneWarning) {
  const LogCapture log;
  EXPECT_FALSE(Mlx5::load("/nonexistent/libmlx5.so"));
  EXPECT_EQ(log.only_warning().rfind("cannot open VERBATIM_MLX5_LIBRARY: /nonexistent", 0), 0U) << log.only_warning();
}

TEST(Mlx5, LibraryWithoutFunctions_IsNotUsed) {
  const LogCapture log;
  EXPECT_FALSE(Mlx5::load(FAKE_VERBS));
  EXPECT_TRUE(log.warnings().empty());
  EXPECT_EQ(log.infos().size(), 1U);
}

TEST(Mlx5, QueryDevice_ReturnsCapabilities) {
  Mlx5 mlx5;
  mlx5.query_device = [](ibv_context*, mlx5dv_context* attributes) {
    EXPECT_NE(attributes->comp_mask & MLX5DV_CONTEXT_MASK_NUM_LAG_PORTS, 0U);
    attributes->flags = MLX5DV_CONTEXT_FLAGS_CQE_V1;
    attributes->num_lag_ports = 2;
    return 0;
  };
  const Result<Mlx5Capabilities> capabilities = mlx5.capabilities(nullptr);
  ASSERT_TRUE(capabilities);
  EXPECT_EQ(capabilities->flags, std::uint64_t{MLX5DV_CONTEXT_FLAGS_CQE_V1});
  EXPECT_EQ(capabilities->num_lag_ports, 2);
}

TEST(Mlx5, FieldNotInCompMask_IsIgnored) {
  Mlx5 mlx5;
  mlx5.query_device = [](ibv_context*, mlx5dv_context* attributes) {
    attributes->comp_mask = 0;
    attributes->num_lag_ports = 9;
    return 0;
  };
  EXPECT_EQ(mlx5.capabilities(nullptr)->num_lag_ports, 0);
  mlx5.query_device = [](ibv_context*, mlx5dv_context*) { return EOPNOTSUPP; };
  EXPECT_EQ(mlx5.capabilities(nullptr).error().sys_errno, EOPNOTSUPP);
}

}  // namespace
}  // namespace verbatim
