#include "net/transfer/lanes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
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

constexpr std::uint32_t kAll = kLargestShare;

TEST(QpShares, EqualPorts_EqualShares) {
  EXPECT_EQ(qp_shares(two_ports(4), Shares{400'000, 400'000}, Shares{400'000, 400'000}),
            Shares({kAll, kAll, kAll, kAll}));
  EXPECT_EQ(qp_shares(two_ports(1), Shares{1}, Shares{800'000}), Shares({kAll}));
}

TEST(QpShares, SlowerPortAtEitherEnd_DecidesTheLane) {
  const Shares fast{100'000, 100'000};
  const Shares mixed{100'000, 25'000};
  EXPECT_EQ(qp_shares(two_ports(2), mixed, fast), Shares({kAll, kAll / 4}));
  EXPECT_EQ(qp_shares(two_ports(2), fast, Shares{25'000, 100'000}), Shares({kAll / 4, kAll}));
  EXPECT_EQ(qp_shares(two_ports(4), mixed, mixed), Shares({kAll, kAll / 4, kAll, kAll / 4}));
}

// Two ports send to one of 100: what the slower one cannot use the other gets.
TEST(QpShares, PortWithSeveralQps_DividesItsSpeed) {
  const std::vector<QpLane> to_one{{0, 0}, {1, 0}};
  EXPECT_EQ(qp_shares(to_one, Shares{100'000, 50'000}, Shares{100'000}), Shares({kAll, kAll}));
  EXPECT_EQ(qp_shares(to_one, Shares{100'000, 25'000}, Shares{100'000}), Shares({kAll, kAll / 3}));  // 75 and 25
  const std::vector<QpLane> from_one{{0, 0}, {0, 1}, {0, 2}};
  EXPECT_EQ(qp_shares(from_one, Shares{200'000}, Shares{40'000, 200'000, 200'000}), Shares({kAll / 2, kAll, kAll}));
}

TEST(QpShares, LaneBelowAnEighth_IsStandby) {
  EXPECT_EQ(qp_shares(two_ports(2), Shares{100'000, 12'500}, Shares{100'000, 12'500}), Shares({kAll, kAll / 8}));
  EXPECT_EQ(qp_shares(two_ports(2), Shares{100'000, 12'499}, Shares{100'000, 100'000}), Shares({kAll, 0}));
  EXPECT_EQ(qp_shares(two_ports(4), Shares{10'000, 400'000}, Shares{400'000, 400'000}), Shares({0, kAll, 0, kAll}));
  EXPECT_EQ(fastest_qp(Shares{0, kAll, 0, kAll}), 1U);
  EXPECT_EQ(fastest_qp(Shares{1, kAll, kAll}), 1U);
}

TEST(QpTurns, FollowTheShares) {
  EXPECT_EQ(qp_turns(Shares{kAll}), Turns({0}));
  EXPECT_EQ(qp_turns(Shares{kAll, kAll, kAll}), Turns({0, 1, 2}));
  EXPECT_EQ(qp_turns(Shares{kAll, 0}), Turns({0}));
  EXPECT_EQ(qp_turns(Shares{0, kAll, kAll}), Turns({1, 2}));
  const Turns turns = qp_turns(Shares{kAll, kAll / 4});  // 4 to 1, spread over the round
  ASSERT_EQ(turns.size(), 5U);
  EXPECT_EQ(std::count(turns.begin(), turns.end(), 0), 4);
  EXPECT_NE(turns.front(), 1);
  EXPECT_NE(turns.back(), 1);
  EXPECT_EQ(qp_turns(Shares(128, kAll)).size(), 128U);
}

QpLoad load_of(std::uint32_t share, std::uint32_t outstanding_kib = 0) {
  QpLoad load(share);
  load.outstanding = outstanding_kib;
  return load;
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
  EXPECT_EQ(divide(kMiB, {load_of(kAll), load_of(kAll)}), (std::vector<std::uint64_t>{kMiB / 2, kMiB / 2}));
  const auto weighted = divide(5 * kMiB, {load_of(kAll), load_of(kAll / 4)});
  EXPECT_NEAR(static_cast<double>(weighted[0]), 4.0 * kMiB, 256);
  EXPECT_EQ(divide(kMiB, {load_of(kAll), load_of(0)}), (std::vector<std::uint64_t>{kMiB, 0}));
  EXPECT_EQ(divide(kMiB, {load_of(kAll, 500)}), (std::vector<std::uint64_t>{kMiB}));
}

TEST(DivideByLoad, OutstandingBytes_AreEvenedOut) {
  constexpr std::uint32_t kTwoMiB = 2048;
  const auto even = divide(4 * kMiB, {load_of(kAll, kTwoMiB), load_of(kAll)});
  EXPECT_NEAR(static_cast<double>(even[0]), 1.0 * kMiB, 256);
  EXPECT_NEAR(static_cast<double>(even[1]), 3.0 * kMiB, 256);
  EXPECT_EQ(divide(kMiB, {load_of(kAll, kTwoMiB), load_of(kAll)}), (std::vector<std::uint64_t>{0, kMiB}));
  // The slow QP has as much to send as the fast one, and takes four times as long for it.
  EXPECT_EQ(divide(kMiB, {load_of(kAll, kTwoMiB), load_of(kAll / 4, kTwoMiB)}), (std::vector<std::uint64_t>{kMiB, 0}));
  const auto loaded = divide(5 * kMiB, {load_of(kAll, 4 * kTwoMiB), load_of(kAll / 4, kTwoMiB)});
  EXPECT_NEAR(static_cast<double>(loaded[0]), 4.0 * kMiB, 256);
}

TEST(DivideByLoad, StripeNotWorthItsDoorbell_IsLeftOut) {
  // QP 0 would get 1/38 of the message; half of it is its share.
  EXPECT_EQ(divide(32 * kMiB, {load_of(kAll, 31'040), load_of(kAll)}), (std::vector<std::uint64_t>{0, 32 * kMiB}));
}

TEST(DivideByLoad, ManyQpsAndAnySize_CoverTheMessage) {
  std::vector<QpLoad> loads;
  for (std::uint32_t i = 0; i < 128; ++i) loads.push_back(load_of(1 + i * 97 % kAll, i * 131 % 8191 * 20'000));
  const std::vector<QpLoad> full(128, load_of(kAll, ~0U));
  for (const std::uint64_t bytes :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{127}, std::uint64_t{1000}, std::uint64_t{262'144},
        3 * kMiB + 1, std::uint64_t{1} << 40, std::numeric_limits<std::uint64_t>::max()}) {
    SCOPED_TRACE(bytes);
    divide(bytes, loads);
    divide(bytes, full);
    divide(bytes, {load_of(kAll), load_of(kAll), load_of(kAll)});
    divide(bytes, {load_of(1), load_of(kAll)});
  }
}

TEST(EncodeLoad, IsExactWithinAHundredth) {
  for (std::uint64_t bytes = 1; bytes <= std::uint64_t{1} << 40; bytes += bytes / 7 + 1) {
    const std::uint32_t load = encode_load(bytes);
    ASSERT_LT(load, 1U << kLoadBits);
    ASSERT_NEAR(static_cast<double>(decode_load(load)), static_cast<double>(bytes) / 1024,
                static_cast<double>(bytes) / 1024 / 100 + 0.5);
  }
  EXPECT_LT(encode_load(std::numeric_limits<std::uint64_t>::max()), 1U << kLoadBits);
}

// Ports in simulated time: each sends its stripes one after another at its rate.
class Simulation {
 public:
  // Rates in KiB per unit of time.
  Simulation(std::vector<double> rates, const Shares& shares) : rates_(std::move(rates)), free_(rates_.size(), 0.0) {
    striping_.set_shares(shares);
  }

  // Sends `messages` of `bytes`, `window` under way, as a connection does. Returns the KiB per unit of time.
  double stream(std::uint64_t bytes, std::size_t messages, std::size_t window) {
    std::vector<double> ends;  // of the messages
    const double begin = now_;
    carried_.assign(rates_.size(), 0);
    for (std::size_t i = 0; i < messages; ++i) {
      // The next message is posted when the oldest is complete.
      if (i >= window) complete_until(std::max(now_, ends[i - window]) + pause_ * random_.next());
      double end = now_;
      std::uint64_t done = 0;
      for (const Stripe& stripe : striping_.divide(bytes)) {
        const std::uint64_t stripe_bytes = stripe_end(bytes, stripe) - done;
        done += stripe_bytes;
        carried_[stripe.queue] += stripe_bytes;
        double& free = free_[stripe.queue];
        free = std::max(free, now_) + static_cast<double>(stripe_bytes) / 1024 / rates_[stripe.queue] * varied();
        parts_.push_back({free, stripe.queue, striping_.add(stripe.queue, stripe_bytes)});
        end = std::max(end, free);
      }
      ends.push_back(end);
    }
    complete_until(*std::max_element(ends.begin(), ends.end()));
    return static_cast<double>(bytes) / 1024 * static_cast<double>(messages) / (now_ - begin);
  }

  void set_rate(std::size_t queue, double rate) { rates_[queue] = rate; }
  // Each stripe takes up to so much more time, and the next message is posted up to a MiB's time late.
  void jitter(double part) {
    jitter_ = part;
    pause_ = 1024 / rates_.front();
  }
  // Of the bytes of the last stream.
  double part(std::size_t queue) const {
    const double all = static_cast<double>(std::accumulate(carried_.begin(), carried_.end(), std::uint64_t{0}));
    return static_cast<double>(carried_[queue]) / all;
  }

 private:
  // 0 to 1, the same in each run.
  class Random {
   public:
    double next() {
      state_ = state_ * 6'364'136'223'846'793'005 + 1'442'695'040'888'963'407;
      return static_cast<double>(state_ >> 11) / static_cast<double>(std::uint64_t{1} << 53);
    }

   private:
    std::uint64_t state_ = 1;
  };

  double varied() { return 1 + jitter_ * random_.next(); }

  struct Part {
    double end;
    std::size_t queue;
    std::uint32_t load;
  };

  void complete_until(double time) {
    now_ = time;
    std::erase_if(parts_, [&](const Part& part) {
      if (part.end > now_) return false;
      striping_.complete(part.queue, part.load);
      return true;
    });
  }

  Striping striping_;
  std::vector<double> rates_;
  std::vector<double> free_;  // when the port has sent everything
  std::vector<Part> parts_;   // that are not complete
  std::vector<std::uint64_t> carried_;
  double now_ = 0;
  double jitter_ = 0;
  double pause_ = 0;
  Random random_;
};

TEST(Striping, PortSlowerThanDeclared_BothStayBusy) {
  for (const std::uint64_t bytes : {kMiB, 8 * kMiB}) {
    Simulation ports({100, 25}, {kAll, kAll});
    ports.stream(bytes, 256, 8);
    EXPECT_GE(ports.stream(bytes, 256, 8), 0.9 * 125) << bytes;
    EXPECT_NEAR(ports.part(1), 0.2, 0.04) << bytes;
  }
}

TEST(Striping, PortThatRecovers_CarriesItsShareAgain) {
  Simulation ports({100, 10}, {kAll, kAll});
  ports.stream(kMiB, 512, 8);
  EXPECT_GE(ports.stream(kMiB, 512, 8), 0.85 * 110);
  EXPECT_LE(ports.part(1), 0.15);
  ports.set_rate(1, 100);
  ports.stream(kMiB, 512, 8);
  EXPECT_GE(ports.stream(kMiB, 256, 8), 0.95 * 200);
}

TEST(Striping, PortsAsDeclared_KeepTheirShares) {
  Simulation two({100, 25}, {kAll, kAll / 4});
  EXPECT_GE(two.stream(kMiB, 512, 8), 0.97 * 125);
  EXPECT_NEAR(two.part(1), 0.2, 0.02);
  Simulation four({100, 100, 100, 100}, {kAll, kAll, kAll, kAll});
  EXPECT_GE(four.stream(kMiB, 512, 8), 0.99 * 400);
}

// One message at a time shows nothing. A standby lane carries nothing in any case.
TEST(Striping, NothingMeasured_SharesStay) {
  Simulation ports({100, 25, 100}, {kAll, kAll, 0});
  ports.stream(kMiB, 256, 1);
  EXPECT_NEAR(ports.part(1), 0.5, 1e-9);
  ports.stream(kMiB, 256, 8);
  EXPECT_EQ(ports.part(2), 0);
}

// Then one message at a time is divided by the declared speeds again.
TEST(Striping, OnlyOneMessageAtATime_MeasuredSharesAreForgotten) {
  Simulation ports({100, 10}, {kAll, kAll});
  ports.stream(kMiB, 512, 8);
  EXPECT_LE(ports.part(1), 0.3);
  ports.set_rate(1, 100);
  ports.stream(kMiB, 1000, 1);
  EXPECT_GE(ports.stream(kMiB, 256, 1), 0.99 * 200);
}

// Few large stripes say little: equal ports keep nearly equal shares although posts come at any time.
TEST(Striping, LargeMessagesAtAnyTime_EqualPortsStayEqual) {
  for (const std::uint64_t bytes : {8 * kMiB, 16 * kMiB, 64 * kMiB, 256 * kMiB}) {
    for (const std::size_t window : {std::size_t{2}, std::size_t{3}, std::size_t{8}}) {
      Simulation ports({100, 100}, {kAll, kAll});
      ports.jitter(0.03);
      ports.stream(bytes, 400, window);
      EXPECT_NEAR(ports.part(0), 0.5, 0.03) << bytes << " " << window;
      ports.stream(bytes, 1, 1);
      EXPECT_NEAR(ports.part(0), 0.5, 0.05) << bytes << " " << window;
    }
  }
}

// All stripes of equal QPs are equal, at any number of messages under way.
TEST(Striping, EqualQps_EqualStripes) {
  Simulation ports(std::vector<double>(8, 50), Shares(8, kAll));
  ports.stream(3 * kMiB, 100, 1);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_NEAR(ports.part(i), 0.125, 0.001) << i;
  ports.stream(3 * kMiB, 100, 16);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_NEAR(ports.part(i), 0.125, 0.01) << i;
}

}  // namespace
}  // namespace verbatim
