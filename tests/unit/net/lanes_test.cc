#include "net/transfer/lanes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace verbatim {
namespace {

using Shares = std::vector<std::uint32_t>;
using Turns = std::vector<std::uint8_t>;

constexpr std::uint64_t kMiB = 1 << 20;

// Two ports at each end, QP i on port i modulo two.
std::vector<QpLane> two_ports(std::size_t qps) {
  std::vector<QpLane> lanes;
  for (std::size_t i = 0; i < qps; ++i) {
    lanes.push_back({static_cast<std::uint8_t>(i % 2), static_cast<std::uint8_t>(i % 2)});
  }
  return lanes;
}

TEST(QpShares, EqualPorts_EqualShares) {
  EXPECT_EQ(qp_shares(two_ports(4), Shares{400'000, 400'000}, Shares{400'000, 400'000}), Shares({64, 64, 64, 64}));
  EXPECT_EQ(qp_shares(two_ports(1), Shares{1}, Shares{800'000}), Shares({64}));
}

TEST(QpShares, SlowerPortAtEitherEnd_DecidesTheLane) {
  EXPECT_EQ(qp_shares(two_ports(2), Shares{100'000, 25'000}, Shares{100'000, 100'000}), Shares({64, 16}));
  EXPECT_EQ(qp_shares(two_ports(2), Shares{100'000, 100'000}, Shares{25'000, 100'000}), Shares({16, 64}));
  EXPECT_EQ(qp_shares(two_ports(4), Shares{100'000, 25'000}, Shares{100'000, 25'000}), Shares({64, 16, 64, 16}));
}

// Two ports of 100 and 50 send to one of 100: the fast one has half of the target, as the slow one could.
TEST(QpShares, PortWithSeveralQps_DividesItsSpeed) {
  const std::vector<QpLane> to_one{{0, 0}, {1, 0}};
  EXPECT_EQ(qp_shares(to_one, Shares{100'000, 50'000}, Shares{100'000}), Shares({64, 64}));
  EXPECT_EQ(qp_shares(to_one, Shares{100'000, 25'000}, Shares{100'000}), Shares({64, 32}));
}

TEST(QpShares, LaneBelowAnEighth_IsStandby) {
  EXPECT_EQ(qp_shares(two_ports(2), Shares{100'000, 12'500}, Shares{100'000, 12'500}), Shares({64, 8}));
  EXPECT_EQ(qp_shares(two_ports(2), Shares{100'000, 12'499}, Shares{100'000, 100'000}), Shares({64, 0}));
  EXPECT_EQ(qp_shares(two_ports(4), Shares{10'000, 400'000}, Shares{400'000, 400'000}), Shares({0, 64, 0, 64}));
  EXPECT_EQ(fastest_qp(Shares{0, 64, 0, 64}), 1U);
  EXPECT_EQ(fastest_qp(Shares{16, 64, 64}), 1U);
}

TEST(QpTurns, FollowTheShares) {
  EXPECT_EQ(qp_turns(Shares{64}), Turns({0}));
  EXPECT_EQ(qp_turns(Shares{64, 64, 64}), Turns({0, 1, 2}));
  EXPECT_EQ(qp_turns(Shares{64, 0}), Turns({0}));
  EXPECT_EQ(qp_turns(Shares{0, 64, 64}), Turns({1, 2}));
  const Turns turns = qp_turns(Shares{64, 16});  // 4 to 1, spread over the round
  ASSERT_EQ(turns.size(), 5U);
  EXPECT_EQ(std::count(turns.begin(), turns.end(), 0), 4);
  EXPECT_NE(turns.front(), 1);
  EXPECT_NE(turns.back(), 1);
  EXPECT_EQ(qp_turns(Shares(128, 64)).size(), 128U);
}

// The bytes of each QP, checked: stripes cover the message in order, and begin at multiples of 128.
std::vector<std::uint64_t> divide(std::uint64_t bytes, const std::vector<QpLoad>& loads) {
  std::vector<Stripe> stripes(loads.size());
  const std::size_t count = divide_by_load(bytes, loads, stripes);
  EXPECT_GE(count, 1U);
  EXPECT_LE(count, loads.size());
  std::vector<std::uint64_t> carried(loads.size(), 0);
  std::uint64_t done = 0;
  for (std::size_t i = 0; i < count; ++i) {
    EXPECT_EQ(done % 128 == 0 || done == bytes, true) << done;
    const std::uint64_t end = stripe_end(bytes, stripes[i]);
    EXPECT_GE(end, done);
    EXPECT_EQ(carried[stripes[i].queue], 0U) << "two stripes on QP " << stripes[i].queue;
    EXPECT_NE(loads[stripes[i].queue].share, 0U);
    carried[stripes[i].queue] = end - done;
    done = end;
  }
  EXPECT_EQ(done, bytes);
  return carried;
}

TEST(DivideByLoad, IdleQps_GetTheirShares) {
  EXPECT_EQ(divide(kMiB, {{64, 0}, {64, 0}}), (std::vector<std::uint64_t>{kMiB / 2, kMiB / 2}));
  const auto weighted = divide(5 * kMiB, {{64, 0}, {16, 0}});
  EXPECT_NEAR(static_cast<double>(weighted[0]), 4.0 * kMiB, 256);
  EXPECT_EQ(divide(kMiB, {{64, 0}, {0, 0}}), (std::vector<std::uint64_t>{kMiB, 0}));
  EXPECT_EQ(divide(kMiB, {{64, 500}}), (std::vector<std::uint64_t>{kMiB}));
}

// 64 units are 2 MiB.
TEST(DivideByLoad, OutstandingBytes_AreEvenedOut) {
  const auto even = divide(4 * kMiB, {{64, 64}, {64, 0}});
  EXPECT_NEAR(static_cast<double>(even[0]), 1.0 * kMiB, 256);
  EXPECT_NEAR(static_cast<double>(even[1]), 3.0 * kMiB, 256);
  EXPECT_EQ(divide(kMiB, {{64, 64}, {64, 0}}), (std::vector<std::uint64_t>{0, kMiB}));
  // The slow QP has as much to send as the fast one, and takes four times as long for it.
  EXPECT_EQ(divide(kMiB, {{64, 64}, {16, 64}}), (std::vector<std::uint64_t>{kMiB, 0}));
  // Equally loaded.
  const auto loaded = divide(5 * kMiB, {{64, 256}, {16, 64}});
  EXPECT_NEAR(static_cast<double>(loaded[0]), 4.0 * kMiB, 256);
}

TEST(DivideByLoad, StripeNotWorthItsDoorbell_IsLeftOut) {
  // QP 0 would get 1/38 of the message; half of it is its share.
  EXPECT_EQ(divide(32 * kMiB, {{64, 970}, {64, 0}}), (std::vector<std::uint64_t>{0, 32 * kMiB}));
}

TEST(DivideByLoad, ManyQpsAndAnySize_CoverTheMessage) {
  std::vector<QpLoad> loads;
  for (std::uint32_t i = 0; i < 128; ++i) loads.push_back({1 + i * 7 % 64, i * 131 % 8191 * 200});
  std::vector<QpLoad> full(128, {64, static_cast<std::uint32_t>(256 * kMaxLoadUnits)});
  for (const std::uint64_t bytes :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{127}, std::uint64_t{1000}, std::uint64_t{262'144},
        3 * kMiB + 1, std::uint64_t{1} << 40, std::numeric_limits<std::uint64_t>::max()}) {
    SCOPED_TRACE(bytes);
    divide(bytes, loads);
    divide(bytes, full);
    divide(bytes, {{64, 0}, {64, 0}, {64, 0}});
    divide(bytes, {{1, 0}, {64, 0}});
  }
}

TEST(LoadUnits, AreRoundedAndLimited) {
  EXPECT_EQ(load_units(0), 0U);
  EXPECT_EQ(load_units(16'383), 0U);
  EXPECT_EQ(load_units(16'384), 1U);
  EXPECT_EQ(load_units(kMiB), 32U);
  EXPECT_EQ(load_units(std::numeric_limits<std::uint64_t>::max()), kMaxLoadUnits);
}

}  // namespace
}  // namespace verbatim
