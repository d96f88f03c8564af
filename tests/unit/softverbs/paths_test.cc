//: in softverbs_parts_test

// The hash that spreads QPs over the paths of the fabric, and what it is computed from.
#include "softverbs/fabric/paths.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <random>
#include <set>
#include <vector>

namespace verbatim::softverbs {
namespace {

constexpr std::uint32_t kLabels = 1U << 20;
constexpr std::uint32_t kFirstUdpPort = 0xc000;
constexpr std::uint32_t kUdpPorts = 1U << 14;

class Paths : public testing::Test {
 protected:
  Paths() {
    port->ethernet = 1;
    const auto gid = [](std::uint8_t last) {
      ibv_gid result{};
      for (std::size_t i = 0; i < sizeof result.raw; ++i) result.raw[i] = static_cast<std::uint8_t>(0xa0 + i);
      result.raw[15] = last;
      return result;
    };
    port->gid_tables[0][0] = {gid(1), IBV_GID_TYPE_ROCE_V1, 1};
    port->gid_tables[0][1] = {gid(1), IBV_GID_TYPE_ROCE_V2, 1};
    port->gid_tables[0][2] = {gid(3), IBV_GID_TYPE_ROCE_V2, 1};
    address.is_global = 1;
    address.grh.dgid = gid(2);
    address.grh.sgid_index = 1;
  }

  // Label 0 stands for itself, because the product of the QP numbers is 0.
  std::uint32_t path_of(std::uint32_t flow_label, std::uint32_t paths) {
    address.grh.flow_label = flow_label;
    return choose_path(*port, address, 0, 0, paths).path;
  }

  const std::unique_ptr<SharedPort> port = std::make_unique<SharedPort>();
  ibv_ah_attr address{};
};

TEST_F(Paths, UdpSourcePort_IsThatOfRdmaCore) {
  for (std::uint32_t label = 0; label < kLabels; ++label) {
    ASSERT_EQ(udp_source_port(label), ibv_flow_label_to_udp_sport(label)) << label;
  }
  EXPECT_EQ(udp_source_port(0), 0xc000);
  EXPECT_EQ(udp_source_port(0x3fff), 0xffff);
  EXPECT_EQ(udp_source_port(0xfc000), 0xc03f);
}

TEST_F(Paths, LabelOfQpNumbers_IsTheFoldedProduct) {
  EXPECT_EQ(default_flow_label(0, 7), 0U);
  EXPECT_EQ(default_flow_label(3, 5), 15U);
  EXPECT_EQ(default_flow_label(0x400, 0x400), 1U);        // 2^20: bit 20 falls on bit 0
  EXPECT_EQ(default_flow_label(0x100000, 0x100000), 1U);  // 2^40: by 20 to bit 20, by 40 to bit 0
  EXPECT_EQ(default_flow_label(0xffffff, 0xffffff), 0xfff1eU);
  EXPECT_EQ(default_flow_label(0x101, 0x10203), default_flow_label(0x10203, 0x101));
}

TEST_F(Paths, Hash_IsLinear) {
  std::mt19937 random(7);
  const auto any_byte = [&] { return static_cast<std::uint8_t>(random()); };
  for (int round = 0; round < 1000; ++round) {
    std::array<std::uint8_t, 34> a{};
    std::array<std::uint8_t, 34> b{};
    std::array<std::uint8_t, 34> both{};
    for (std::size_t i = 0; i < a.size(); ++i) both[i] = (a[i] = any_byte()) ^ (b[i] = any_byte());
    ASSERT_EQ(path_hash(both), path_hash(a) ^ path_hash(b));
  }
  EXPECT_EQ(path_hash(std::array<std::uint8_t, 34>{}), 0U);
  // CRC-32 has the check value 0xcbf43926. The inversions at both ends are a constant for inputs of this length.
  const std::array<std::uint8_t, 9> digits{'1', '2', '3', '4', '5', '6', '7', '8', '9'};
  std::array<std::uint8_t, 9> inverted = digits;
  for (std::size_t i = 0; i < 4; ++i) inverted[i] ^= 0xff;
  EXPECT_EQ(~path_hash(inverted), 0xcbf43926U);
}

TEST_F(Paths, EightConsecutivePorts_ReachAllPaths) {
  for (const std::uint32_t paths : {2U, 4U, 8U}) {
    for (std::uint32_t base = 0; base < kUdpPorts; base += 8) {
      std::vector<std::uint32_t> uses(paths);
      for (std::uint32_t i = 0; i < 8; ++i) {
        ASSERT_EQ(udp_source_port(base + i), kFirstUdpPort + base + i);
        ++uses[path_of(base + i, paths)];
      }
      ASSERT_EQ(uses, std::vector<std::uint32_t>(paths, 8 / paths)) << base << " over " << paths;
    }
  }
}

TEST_F(Paths, PathsOfAnyNumber_AreUsed) {
  for (std::uint32_t paths = 1; paths <= 64; ++paths) {
    std::set<std::uint32_t> used;
    for (std::uint32_t label = 1; label <= 4096; ++label) used.insert(path_of(label, paths));
    EXPECT_EQ(used.size(), paths);
    EXPECT_EQ(*used.rbegin(), paths - 1);
  }
}

TEST_F(Paths, Addresses_ArePartOfTheHash) {
  const auto paths_of_64_labels = [&] {
    std::vector<std::uint32_t> all;
    for (std::uint32_t label = 1; label <= 64; ++label) all.push_back(path_of(label, 64));
    return all;
  };
  const std::vector<std::uint32_t> first = paths_of_64_labels();
  address.grh.sgid_index = 2;
  const std::vector<std::uint32_t> other_source = paths_of_64_labels();
  EXPECT_NE(other_source, first);
  address.grh.sgid_index = 1;
  address.grh.dgid.raw[15] = 9;
  EXPECT_NE(paths_of_64_labels(), first);
}

TEST_F(Paths, WithoutLabel_QpNumbersDecide) {
  for (std::uint32_t dest = 1; dest < 100; ++dest) {
    address.grh.flow_label = 0;
    const PathChoice chosen = choose_path(*port, address, 0x4321, dest, 64);
    EXPECT_EQ(chosen.udp_source_port, udp_source_port(default_flow_label(0x4321, dest)));
    address.grh.flow_label = default_flow_label(0x4321, dest);
    EXPECT_EQ(choose_path(*port, address, 1, 1, 64).path, chosen.path);
  }
}

TEST_F(Paths, RoceV1_HasNoUdpPort) {
  address.grh.sgid_index = 0;
  std::set<std::uint32_t> used;
  for (std::uint32_t label = 0; label < 64; ++label) {
    address.grh.flow_label = label;
    const PathChoice chosen = choose_path(*port, address, label, label, 64);
    EXPECT_EQ(chosen.udp_source_port, 0);
    used.insert(chosen.path);
  }
  EXPECT_EQ(used.size(), 1U);
}

TEST_F(Paths, InfiniBand_LidsDecide) {
  port->ethernet = 0;
  port->lid = 1;
  std::set<std::uint32_t> used;
  for (std::uint16_t lid = 1; lid <= 8; ++lid) {
    address.dlid = lid;
    const PathChoice chosen = choose_path(*port, address, 0x101, 0x102, 4);
    EXPECT_EQ(chosen.udp_source_port, 0);
    address.grh.flow_label = lid;
    EXPECT_EQ(choose_path(*port, address, 0x103, 0x104, 4).path, chosen.path);
    used.insert(chosen.path);
  }
  EXPECT_EQ(used.size(), 4U);
}

}  // namespace
}  // namespace verbatim::softverbs
