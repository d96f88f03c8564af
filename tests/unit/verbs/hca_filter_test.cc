#include "verbs/hca_filter.h"

#include <gtest/gtest.h>

namespace verbatim {
namespace {

HcaFilter filter(std::string_view text) {
  Result<HcaFilter> parsed = HcaFilter::parse(text);
  EXPECT_TRUE(parsed) << text;
  return parsed ? *parsed : HcaFilter{};
}

bool selects(std::string_view text, std::string_view device, std::uint8_t port = 1) {
  return filter(text).match(device, port).selected;
}

TEST(HcaFilter, Empty_SelectsEverything) {
  EXPECT_TRUE(selects("", "mlx5_0"));
  EXPECT_TRUE(filter("").may_select("mlx5_0"));
}

TEST(HcaFilter, Prefix_SelectsMatchingNames) {
  EXPECT_TRUE(selects("mlx5", "mlx5_0"));
  EXPECT_TRUE(selects("mlx5_1", "mlx5_11"));
  EXPECT_FALSE(selects("mlx5_1", "mlx5_2"));
  EXPECT_TRUE(selects("bnxt,mlx5_2", "mlx5_2"));
  EXPECT_TRUE(selects("mlx5_1,", "mlx5_1"));
}

TEST(HcaFilter, ExactName_SelectsOnlyThatName) {
  EXPECT_TRUE(selects("=mlx5_1", "mlx5_1"));
  EXPECT_FALSE(selects("=mlx5_1", "mlx5_11"));
  EXPECT_TRUE(selects("=mlx5_1,mlx5_11", "mlx5_11"));
}

TEST(HcaFilter, Port_SelectsOnlyThatPort) {
  EXPECT_TRUE(selects("mlx5_0:1", "mlx5_0", 1));
  EXPECT_FALSE(selects("mlx5_0:1", "mlx5_0", 2));
  EXPECT_TRUE(selects("mlx5_0:1,mlx5_0:2", "mlx5_0", 2));
  EXPECT_TRUE(filter("mlx5_0:2").may_select("mlx5_0"));
  EXPECT_FALSE(filter("mlx5_0:2").may_select("mlx5_1"));
}

TEST(HcaFilter, Exclusion_SelectsOthers) {
  EXPECT_FALSE(selects("^mlx5_1", "mlx5_11"));
  EXPECT_TRUE(selects("^mlx5_1", "mlx5_2"));
  EXPECT_TRUE(selects("^=mlx5_1", "mlx5_11"));
  EXPECT_FALSE(selects("^=mlx5_1,mlx5_11", "mlx5_11"));
  EXPECT_FALSE(selects("^mlx5_0:1", "mlx5_0", 1));
  EXPECT_TRUE(selects("^mlx5_0:1", "mlx5_0", 2));
  EXPECT_TRUE(filter("^mlx5_0:1").may_select("mlx5_0"));
  EXPECT_FALSE(filter("^mlx5_0").may_select("mlx5_0"));
}

TEST(HcaFilter, RailAndPlane_AreReturned) {
  const HcaFilter two = filter("=mlx5_0:1:0:1,mlx5_1::3,mlx5_2");
  EXPECT_EQ(two.match("mlx5_0", 1).rail_id, 0);
  EXPECT_EQ(two.match("mlx5_0", 1).plane_id, 1);
  EXPECT_FALSE(two.match("mlx5_0", 2).selected);
  EXPECT_EQ(two.match("mlx5_1", 2).rail_id, 3);
  EXPECT_EQ(two.match("mlx5_1", 2).plane_id, -1);
  EXPECT_EQ(two.match("mlx5_2", 1).rail_id, -1);
}

TEST(HcaFilter, SeveralMatches_FirstIsUsed) {
  EXPECT_EQ(filter("mlx5_0:1:7,mlx5:1:2").match("mlx5_0", 1).rail_id, 7);
  EXPECT_EQ(filter("mlx5_0:1:7,mlx5:1:2").match("mlx5_3", 1).rail_id, 2);
}

TEST(HcaFilter, MalformedFilter_IsRejected) {
  for (const char* text : {"mlx5_0:x", "mlx5_0:1x", "mlx5_0:0", "mlx5_0:256", "mlx5_0:-1", ":1", "mlx5_0:1:-1",
                           "mlx5_0:1:0:0:0", "^", "=", "^=", "mlx5_0:1:99999999999"}) {
    const Result<HcaFilter> parsed = HcaFilter::parse(text);
    ASSERT_FALSE(parsed) << text;
    EXPECT_EQ(parsed.error().kind, ErrorKind::kUsage);
  }
}

}  // namespace
}  // namespace verbatim
