#include "verbs/gid.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "support/scratch_directory.h"
#include "unit/support/fake_verbs.h"

namespace verbatim {
namespace {

constexpr auto kV1 = RoceVersion::kV1;
constexpr auto kV2 = RoceVersion::kV2;

struct Slot {
  unsigned index;
  const char* gid;
  RoceVersion version;
};

int best(std::initializer_list<Slot> slots, const GidSetting& setting = {}) {
  std::vector<GidEntry> entries;
  for (const Slot& slot : slots) entries.push_back({slot.index, fake_gid(slot.gid, 0).gid, slot.version});
  const auto chosen = best_gid(entries, setting);
  return chosen ? static_cast<int>(chosen->index) : -1;
}

// Of a RoCE port.
std::string why(std::initializer_list<Slot> slots, const GidSetting& setting = {}) {
  std::vector<GidEntry> entries;
  for (const Slot& slot : slots) entries.push_back({slot.index, fake_gid(slot.gid, 0).gid, slot.version});
  ibv_port_attr port = {};
  port.link_layer = IBV_LINK_LAYER_ETHERNET;
  return why_chosen(best_gid(entries, setting).value_or(GidEntry{}), entries, "mlx5_0", port, setting);
}

TEST(WhyChosen, SecondBestEntry_DecidesTheReason) {
  const GidSetting range{.range = AddressRange{.prefix = IN6ADDR_ANY_INIT, .bits = 1}};  // IPv4 is in it, too
  EXPECT_EQ(why({{0, "fe80::1", kV1}}), "it is the only one");
  EXPECT_EQ(why({{0, "::ffff:10.0.0.1", kV1}, {1, "fe80::1", kV2}}), "RoCE v2 is preferred");
  EXPECT_EQ(why({{0, "fe80::1", kV2}, {1, "2001:db8::1", kV2}}), "its address is routable");
  EXPECT_EQ(why({{0, "2001:db8::1", kV2}, {1, "::ffff:10.0.0.1", kV2}}), "IPv4 is preferred");
  EXPECT_EQ(why({{0, "::ffff:10.0.0.1", kV2}, {1, "::ffff:10.0.0.2", kV2}}), "it is the first of equals");
  EXPECT_EQ(why({{0, "fe80::1", kV2}, {1, "::ffff:10.0.0.1", kV1}}, range), "its address is in VERBATIM_ADDR_RANGE");
  EXPECT_EQ(why({{0, "fe80::1", kV1}, {1, "fe80::1", kV2}}, {.roce_version = 1}), "RoCE v1 is preferred");
  EXPECT_EQ(why({{0, "2001:db8::1", kV2}, {1, "::ffff:10.0.0.1", kV2}}, {.family = AF_INET6}), "IPv6 is preferred");
  EXPECT_EQ(why({{0, "fe80::1", kV1}}, {.everywhere = 0U, .variable = "NCCL_IB_GID_INDEX"}),
            "set by NCCL_IB_GID_INDEX");
}

TEST(BestGid, UsualMlx5Table_PrefersIpv4RoceV2) {
  EXPECT_EQ(best({{0, "fe80::1", kV1}, {1, "fe80::1", kV2}, {2, "::ffff:10.0.0.1", kV1}, {3, "::ffff:10.0.0.1", kV2}}),
            3);
}

TEST(BestGid, BothVersions_PrefersRoceV2) {
  EXPECT_EQ(best({{0, "::ffff:10.0.0.1", kV1}, {1, "fe80::1", kV2}}), 1);
  EXPECT_EQ(best({{0, "::ffff:10.0.0.1", kV1}, {1, "::ffff:10.0.0.1", RoceVersion::kUnknown}}), 1);
}

TEST(BestGid, OnlyIpv6_PrefersGlobalAddress) {
  EXPECT_EQ(best({{0, "fe80::1", kV1}, {1, "fe80::1", kV2}, {2, "2001:db8::1", kV1}, {3, "2001:db8::1", kV2}}), 3);
  EXPECT_EQ(best({{4, "fd00::1", kV2}, {5, "fe80::1", kV2}}), 4);
}

TEST(BestGid, OnlyLinkLocal_IsUsed) {
  EXPECT_EQ(best({{0, "fe80::1", kV1}, {1, "fe80::1", kV2}}), 1);
}
TEST(BestGid, OnlyRoceV1_IsUsed) {
  EXPECT_EQ(best({{0, "fe80::1", kV1}, {2, "::ffff:10.0.0.1", kV1}}), 2);
}

TEST(BestGid, LinkLocalIpv4_IsLessPreferred) {
  EXPECT_EQ(best({{1, "::ffff:169.254.3.4", kV2}, {3, "2001:db8::1", kV2}}), 3);
}

TEST(BestGid, EqualEntries_LowestIndexIsUsed) {
  EXPECT_EQ(best({{3, "::ffff:10.0.0.1", kV2}, {5, "::ffff:10.0.0.2", kV2}}), 3);
  EXPECT_EQ(best({{5, "::ffff:10.0.0.2", kV2}, {3, "::ffff:10.0.0.1", kV2}}), 3);
}

TEST(BestGid, EmptyEntries_AreNotUsed) {
  EXPECT_EQ(best({{0, "::", kV2}, {1, "fe80::1", kV1}}), 1);
  EXPECT_EQ(best({{0, "::", kV2}}), -1);
  EXPECT_EQ(best({}), -1);
}

TEST(BestGid, PreferredRoceVersion_IsUsed) {
  GidSetting setting;
  setting.roce_version = 1;
  EXPECT_EQ(best({{2, "::ffff:10.0.0.1", kV1}, {3, "::ffff:10.0.0.1", kV2}}, setting), 2);
  EXPECT_EQ(best({{3, "::ffff:10.0.0.1", kV2}}, setting), 3);
}

TEST(BestGid, PreferredFamily_IsUsed) {
  GidSetting setting;
  setting.family = AF_INET6;
  EXPECT_EQ(best({{1, "fe80::1", kV2}, {3, "::ffff:10.0.0.1", kV2}, {5, "2001:db8::1", kV2}}, setting), 5);
  EXPECT_EQ(best({{1, "fe80::1", kV2}, {3, "::ffff:10.0.0.1", kV2}}, setting), 3);
}

TEST(BestGid, PreferredRange_ComesBeforeVersionAndFamily) {
  GidSetting setting;
  AddressRange range;
  ASSERT_EQ(inet_pton(AF_INET6, "::ffff:10.2.0.0", &range.prefix), 1);
  range.bits = 96 + 16;
  setting.range = range;
  EXPECT_EQ(best({{3, "::ffff:10.1.0.1", kV2}, {5, "::ffff:10.2.255.1", kV1}}, setting), 5);
  EXPECT_EQ(best({{3, "::ffff:10.1.0.1", kV2}, {5, "::ffff:10.3.0.1", kV2}}, setting), 3);
}

class ChooseGid : public testing::Test {
 protected:
  ~ChooseGid() override {
    if (context_ != nullptr) fake_.table.close_device(context_);
  }

  Result<GidEntry> choose(const GidSetting& setting = {}) {
    if (context_ == nullptr) context_ = fake_.table.open_device(&device_.device);
    return choose_gid(fake_.table, context_, "mlx5_0", 1, port_.attributes, setting);
  }

  FakeVerbs fake_;
  FakeDevice& device_ = fake_.add_device("mlx5_0");
  FakePort& port_ = device_.add_roce_port();
  ibv_context* context_ = nullptr;
};

TEST_F(ChooseGid, EmptyEntries_AreSkipped) {
  port_.gids = {std::nullopt, fake_gid("::", IBV_GID_TYPE_ROCE_V2), fake_gid("fe80::1", IBV_GID_TYPE_ROCE_V2),
                std::nullopt, fake_gid("::ffff:10.0.0.1", IBV_GID_TYPE_ROCE_V2)};
  port_.attributes.gid_tbl_len = 8;
  const Result<GidEntry> chosen = choose();
  ASSERT_TRUE(chosen);
  EXPECT_EQ(chosen->index, 4U);
  EXPECT_EQ(to_string(chosen->gid), "::ffff:10.0.0.1");
  EXPECT_EQ(chosen->version, kV2);
}

TEST_F(ChooseGid, NoUsableEntry_IsError) {
  port_.gids = {std::nullopt, fake_gid("::", IBV_GID_TYPE_ROCE_V2)};
  const Result<GidEntry> chosen = choose();
  ASSERT_FALSE(chosen);
  EXPECT_EQ(chosen.error().kind, ErrorKind::kUsage);
  EXPECT_EQ(chosen.error().sys_errno, ENOENT);
}

// Between two connections of a process, an address can be removed, move to another entry, or a better one can be added.
TEST_F(ChooseGid, GidInSameEntry_IsKept) {
  const GidSetting setting;
  port_.gids = {fake_gid("fe80::1", IBV_GID_TYPE_ROCE_V2), fake_gid("2001:db8::1", IBV_GID_TYPE_ROCE_V2)};
  const GidEntry known = *choose();
  ASSERT_EQ(known.index, 1U);
  const auto confirm = [&] {
    return confirm_gid(fake_.table, context_, "mlx5_0", 1, port_.attributes, setting, known);
  };

  port_.gids.emplace_back(fake_gid("::ffff:10.0.0.1", IBV_GID_TYPE_ROCE_V2));
  port_.attributes.gid_tbl_len = 3;
  EXPECT_EQ(confirm()->index, 1U) << "the entry of the connection before is kept";
  port_.gids[1] = std::nullopt;
  EXPECT_EQ(confirm()->index, 2U);
  port_.gids[1] = fake_gid("2001:db8::2", IBV_GID_TYPE_ROCE_V2);
  port_.gids[2] = std::nullopt;
  EXPECT_EQ(to_string(confirm()->gid), "2001:db8::2");
  port_.gids = {};
  EXPECT_EQ(confirm().error().sys_errno, ENOENT);
}

// When a link returns, the addresses of its interface may be at other indices.
TEST_F(ChooseGid, GidInAnotherEntry_IsFound) {
  const std::optional<ibv_gid_entry> own = fake_gid("::ffff:10.0.0.1", IBV_GID_TYPE_ROCE_V2);
  const std::optional<ibv_gid_entry> second = fake_gid("::ffff:10.0.0.2", IBV_GID_TYPE_ROCE_V2);
  const std::optional<ibv_gid_entry> twin = fake_gid("::ffff:10.0.0.1", IBV_GID_TYPE_ROCE_V1);
  port_.gids = {std::nullopt, own, second};
  port_.attributes.gid_tbl_len = 5;
  const GidEntry known = *choose({.everywhere = 1U});
  for (const GidSetting& setting : {GidSetting{}, GidSetting{.everywhere = 1U}}) {
    const auto index = [&] {
      return confirm_gid(fake_.table, context_, "mlx5_0", 1, port_.attributes, setting, known)->index;
    };
    port_.gids = {std::nullopt, std::nullopt, second, twin, own};
    EXPECT_EQ(index(), 4U);
    port_.gids = {own, second};  // the entry that the setting names has another address
    EXPECT_EQ(index(), 0U);
    port_.gids = {std::nullopt, second};  // the address has gone
    EXPECT_EQ(index(), 1U);
  }
}

TEST_F(ChooseGid, GidIndexSetting_IsUsed) {
  port_.gids = {fake_gid("fe80::1", IBV_GID_TYPE_ROCE_V1), fake_gid("::ffff:10.0.0.1", IBV_GID_TYPE_ROCE_V2)};
  EXPECT_EQ(choose({.everywhere = 0U})->index, 0U);
  EXPECT_EQ(choose({.per_device = {{"mlx5_0", 0}}})->index, 0U);
  EXPECT_EQ(choose({.per_device = {{"mlx5_1", 0}}})->index, 1U);
}

TEST_F(ChooseGid, GidIndexSettingOfEmptyEntry_IsError) {
  port_.gids = {std::nullopt, fake_gid("::", IBV_GID_TYPE_ROCE_V2)};
  for (const unsigned index : {0U, 1U, 3U, 200U}) {
    const Result<GidEntry> chosen = choose({.everywhere = index});
    ASSERT_FALSE(chosen) << index;
    EXPECT_EQ(chosen.error().sys_errno, ENODATA);
  }
}

TEST_F(ChooseGid, Infiniband_UsesIndexZero) {
  port_.attributes.link_layer = IBV_LINK_LAYER_INFINIBAND;
  port_.gids = {fake_gid("fe80::9", IBV_GID_TYPE_IB)};
  EXPECT_EQ(to_string(choose({.everywhere = 3U})->gid), "fe80::9");
  port_.gids = {std::nullopt};
  EXPECT_EQ(choose()->index, 0U);
}

TEST_F(ChooseGid, InfinibandWithFlid_UsesIndexOfSetting) {
  port_.attributes.link_layer = IBV_LINK_LAYER_INFINIBAND;
  port_.gids = {fake_gid("fec0:0:0:7::9", IBV_GID_TYPE_IB), fake_gid("fec0:0:8001:7::9", IBV_GID_TYPE_IB)};
  EXPECT_EQ(choose()->index, 1U);
  EXPECT_EQ(choose({.flid_index = 0})->index, 0U);
  EXPECT_EQ(choose({.flid_index = 200})->index, 0U);
  port_.gids[1] = fake_gid("fec0:0:0:8::9", IBV_GID_TYPE_IB);
  EXPECT_EQ(choose()->index, 0U);
}

TEST_F(ChooseGid, WithoutQueryGidEx_VersionIsReadFromSysfs) {
  const ScratchDirectory scratch;
  const std::filesystem::path& sysfs = scratch.path();
  std::filesystem::create_directories(sysfs / "ports/1/gid_attrs/types");
  std::ofstream(sysfs / "ports/1/gid_attrs/types/0") << "RoCE v2\n";
  std::ofstream(sysfs / "ports/1/gid_attrs/types/1") << "IB/RoCE v1\n";
  sysfs.string().copy(device_.device.ibdev_path, sizeof device_.device.ibdev_path - 1);
  fake_.table.query_gid_ex = nullptr;
  port_.gids = {fake_gid("fe80::1", 0), fake_gid("::ffff:10.0.0.1", 0), std::nullopt, fake_gid("fe80::2", 0)};

  const Result<GidEntry> chosen = choose();
  const std::vector<GidEntry> table = read_gid_table(fake_.table, context_, 1, port_.attributes);

  ASSERT_EQ(table.size(), 3U);
  EXPECT_EQ(table[0].version, kV2);
  EXPECT_EQ(table[1].version, kV1);
  EXPECT_EQ(table[2].version, RoceVersion::kUnknown);
  ASSERT_TRUE(chosen);
  EXPECT_EQ(chosen->index, 0U);
}

}  // namespace
}  // namespace verbatim
