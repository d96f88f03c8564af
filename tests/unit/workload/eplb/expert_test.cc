// Expert layouts of verbatim-eplb: presets, tensors, scaling, and the parser of --tensors.
#include "workload/eplb/expert.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace verbatim::eplb {
namespace {

TEST(Presets, DeepSeekV3_HasKnownSizes) {
  EXPECT_EQ(44'050'944U, find_preset("dsv3-fp8").expert.bytes());
  EXPECT_EQ(88'080'384U, find_preset("dsv3-bf16").expert.bytes());
  EXPECT_EQ(24'772'620U, find_preset("dsv3-nvfp4").expert.bytes());
  EXPECT_EQ(4U, find_preset("dsv3-fp8").expert.tensors.size());
  EXPECT_EQ(6U, find_preset("dsv3-nvfp4").expert.tensors.size());
  EXPECT_THROW(find_preset("dsv4"), BadInput);
}

TEST(Presets, EveryTensor_IsWholeElements) {
  for (const Preset& preset : presets()) {
    for (const Tensor& tensor : preset.expert.tensors) {
      EXPECT_EQ(0U, tensor.bytes % type_bytes(tensor.type)) << preset.name << ", " << tensor.name;
    }
  }
}

TEST(ExpertLayout, SeveralTensors_ArePackedInOrder) {
  const ExpertLayout expert{{{"a", "fp8", 5}, {"b", "fp32", 8}, {"c", "fp8", 0}, {"d", "fp8", 2}}};
  EXPECT_EQ(15U, expert.bytes());
  EXPECT_EQ((std::vector<std::size_t>{0, 5, 13, 13}), expert.offsets());
  EXPECT_EQ((std::vector<std::size_t>{0, 2, 3, 1}), expert.by_type());
}

TEST(Scaled, SmallTensor_KeepsWholeElements) {
  const ExpertLayout smaller = scaled({{{"a", "fp32", 40}, {"b", "bf16", 2}, {"c", "fp8", 0}}}, 3);
  EXPECT_EQ(12U, smaller.tensors[0].bytes);
  EXPECT_EQ(2U, smaller.tensors[1].bytes);
  EXPECT_EQ(0U, smaller.tensors[2].bytes);
}

std::string error_text(const std::string& text) {
  try {
    parse_tensors(text, 36);
  } catch (const BadInput& bad) {
    return bad.what();
  }
  return "";
}

TEST(ParseTensors, ValidAndMalformedText_IsReadOrRejectedByName) {
  const ExpertLayout expert = parse_tensors("w13:fp8:100,w2:fp32:720:total", 36);
  ASSERT_EQ(2U, expert.tensors.size());
  EXPECT_EQ(100U, expert.tensors[0].bytes);
  EXPECT_EQ(20U, expert.tensors[1].bytes);
  EXPECT_EQ("tensor w2: 721 bytes are not divisible by 36 rows", error_text("w2:fp32:721:total"));
  EXPECT_EQ("tensor w2: 6 bytes per expert are not a multiple of the size of fp32", error_text("w2:fp32:6"));
  EXPECT_EQ("unknown tensor type: 'fp7'", error_text("w2:fp7:6"));
  EXPECT_NE("", error_text("w2:fp8"));
  EXPECT_NE("", error_text("w2:fp8:many"));
  EXPECT_NE("", error_text(""));
}

}  // namespace
}  // namespace verbatim::eplb
