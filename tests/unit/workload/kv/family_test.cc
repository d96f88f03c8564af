// Families and geometries: sizes of known models, the split among tensor-parallel ranks, hashes and addresses.
#include "workload/kv/family.h"

#include <gtest/gtest.h>

#include <set>
#include <stdexcept>

namespace verbatim::kv {
namespace {

TEST(Family, KnownModels_HaveKnownSizes) {
  EXPECT_EQ(32'768U, find_model("llama-70b-tp1").kv.prefill_bytes);
  EXPECT_EQ(16'384U, find_model("llama-70b-tp2").kv.prefill_bytes);
  EXPECT_EQ(8'192U, find_model("llama-70b-tp4").kv.prefill_bytes);
  EXPECT_EQ(4'096U, find_model("llama-70b-tp8").kv.prefill_bytes);
  EXPECT_EQ(73'728U, find_model("deepseek-mla-bf16").kv.prefill_bytes);
  EXPECT_EQ(41'984U, find_model("deepseek-mla-fp8").kv.prefill_bytes);
  EXPECT_EQ(8'448U, indexer_geometry().prefill_bytes);
}

TEST(Family, KnownModels_HaveKnownDescriptorCounts) {
  const auto descriptors = [](const Geometry& geometry) {
    return 4096 / geometry.block_tokens * geometry.layers * geometry.entries;
  };
  EXPECT_EQ(40'960U, descriptors(find_model("llama-70b-tp8").kv));
  EXPECT_EQ(3'904U, descriptors(find_model("deepseek-mla-bf16").kv));
  EXPECT_EQ(3'904U, descriptors(indexer_geometry()));
}

TEST(Family, UnknownModel_IsRejectedWithKnownNames) {
  try {
    find_model("gpt");
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string::npos, std::string(error.what()).find("deepseek-mla-fp8")) << error.what();
  }
}

TEST(Family, TpRatio_SplitsHeadsAndNotLatents) {
  const Geometry heads = shared_by(find_model("llama-70b-tp2").kv, 4);
  EXPECT_EQ(4'096U, heads.part_bytes());
  EXPECT_EQ(12'288U, heads.part_offset(3));
  const Geometry latent = shared_by(find_model("deepseek-mla-bf16").kv, 4);
  EXPECT_EQ(73'728U, latent.part_bytes());
  EXPECT_EQ(0U, latent.part_offset(3));
  EXPECT_THROW(shared_by(find_model("llama-70b-tp4").kv, 4), std::invalid_argument);
}

TEST(Family, Scaled_HasFewerLayersAndSameMessages) {
  const Geometry geometry = scaled(find_model("deepseek-mla-bf16").kv, 16);
  EXPECT_EQ(4U, geometry.layers);
  EXPECT_EQ(73'728U, geometry.prefill_bytes);
  EXPECT_EQ(1U, scaled(geometry, 1000).layers);
}

TEST(Family, EveryProperty_ChangesHash) {
  const Geometry geometry = find_model("llama-70b-tp1").kv;
  std::set<std::uint64_t> hashes{geometry.hash()};
  const auto differs = [&](auto change) {
    Geometry other = geometry;
    change(other);
    EXPECT_TRUE(hashes.insert(other.hash()).second);
  };
  differs([](Geometry& g) { g.family = FamilyId::kLf; });
  differs([](Geometry& g) { g.name = "lf"; });
  differs([](Geometry& g) { g.dtype = "fp16"; });
  differs([](Geometry& g) { ++g.layers; });
  differs([](Geometry& g) { ++g.entries; });
  differs([](Geometry& g) { ++g.block_tokens; });
  differs([](Geometry& g) { ++g.heads; });
  differs([](Geometry& g) { ++g.tp_ratio; });
  differs([](Geometry& g) { ++g.prefill_bytes; });
}

TEST(Family, Addresses_AreOrderedByLayerEntryBlock) {
  Family family{.geometry = find_model("llama-70b-tp8").kv, .num_blocks = 10, .block_len = 4096};
  for (std::uint64_t layer = 0; layer < 80; ++layer) family.bases.push_back(layer * family.layer_bytes());
  std::uint64_t expected = 0;
  for (std::uint32_t layer = 0; layer < 80; ++layer) {
    for (std::uint32_t entry = 0; entry < 2; ++entry) {
      for (std::uint32_t block = 0; block < 10; ++block, expected += 4096) {
        ASSERT_EQ(expected, family.address(layer, entry, block));
      }
    }
  }
  EXPECT_EQ(expected, family.bytes());
}

}  // namespace
}  // namespace verbatim::kv
