// Grouped receives: n members with tags in one request, which is done when all members are complete.
#include <algorithm>
#include <array>
#include <numeric>
#include <random>

#include "conformance.h"

namespace conformance {
namespace {

class Groups : public Conformance {};
EVERY_VERSION(Groups);

class MixedTraffic : public Conformance {};
EVERY_VERSION(MixedTraffic);

std::vector<std::size_t> in_order(std::size_t n) {
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), 0U);
  return order;
}

// n members of about `size` bytes, with different tags and sizes.
Group distinct(std::size_t n, std::size_t size) {
  Group group{{}, in_order(n)};
  for (std::size_t i = 0; i < n; ++i) group.pieces.push_back({size + i, size + i, static_cast<int>(1000 - 7 * i)});
  return group;
}

TEST_P(Groups, UpToFourTagsInEveryOrder_Match) {
  TestConnection link = this->link();
  for (std::size_t n = 1; n <= std::min<std::size_t>(4, max_recvs()); ++n) {
    std::vector<Group> groups;
    Group group = distinct(n, 500);
    do {
      groups.push_back(group);
    } while (std::next_permutation(group.order.begin(), group.order.end()));
    exchange(link, groups);
  }
}

TEST_P(Groups, LargerGroupsInRandomOrder_Match) {
  TestConnection link = this->link();
  std::mt19937 random(7);
  std::vector<Group> groups;
  for (std::size_t n = 5; n <= max_recvs(); ++n) {
    for (int round = 0; round < 8; ++round) {
      groups.push_back(distinct(n, 3000));
      std::shuffle(groups.back().order.begin(), groups.back().order.end(), random);
    }
  }
  if (groups.empty()) groups.push_back(distinct(1, 3000));
  exchange(link, groups);
}

TEST_P(Groups, MembersOfEqualSize_Match) {
  TestConnection link = this->link();
  Group group{{}, {}};
  for (std::size_t i = 0; i < max_recvs(); ++i) group.pieces.push_back({4096, 4096, static_cast<int>(i)});
  group.order = in_order(group.pieces.size());
  std::reverse(group.order.begin(), group.order.end());
  exchange(link, std::vector<Group>(10, group), {.gap = 0});
}

TEST_P(Groups, EqualTags_MatchInPostingOrder) {
  TestConnection link = this->link();
  const std::size_t n = max_recvs();
  Group all_equal{{}, {}};
  Group some_equal{{}, {}};
  for (std::size_t i = 0; i < n; ++i) {
    all_equal.pieces.push_back({200 + i, 400, 5});
    some_equal.pieces.push_back({200 + i, 400, i % 3 == 1 ? 7 : 5});
  }
  Group reversed = some_equal;
  reversed.order = in_order(n);
  std::reverse(reversed.order.begin(), reversed.order.end());
  exchange(link, {all_equal, some_equal, reversed, all_equal, reversed});
}

TEST_P(Groups, EmptyAndShortMembers_ReportSentSizes) {
  TestConnection link = this->link();
  const std::size_t n = max_recvs();
  std::vector<Group> groups;
  for (std::size_t full = 0; full <= n; ++full) {
    Group group{{}, {}};
    for (std::size_t i = 0; i < n; ++i) group.pieces.push_back({i < full ? 777 : 0U, 1000, static_cast<int>(i)});
    groups.push_back(group);
    std::reverse(group.pieces.begin(), group.pieces.end());
    groups.push_back(group);
  }
  Group nothing{{}, {}};
  for (std::size_t i = 0; i < n; ++i) nothing.pieces.push_back({0, 0, static_cast<int>(i)});
  groups.push_back(nothing);
  exchange(link, groups);
}

TEST_P(Groups, LargeMembers_ArriveWhole) {
  TestConnection link = this->link();
  Group group = distinct(max_recvs(), 150'000);
  std::reverse(group.order.begin(), group.order.end());
  exchange(link, {group, group}, {.send_offset = 1, .recv_offset = 5, .gap = 9});
}

// Consecutive groups have the same tags: a send matches the oldest group in which its tag is not matched yet.
TEST_P(Groups, SameTagsInConsecutiveGroups_MatchOldestGroup) {
  TestConnection link = this->link();
  std::vector<Group> groups;
  for (std::size_t round = 0; round < 40; ++round) {
    groups.push_back(distinct(max_recvs(), 100 + round));
    std::rotate(groups.back().order.begin(),
                groups.back().order.begin() + static_cast<std::ptrdiff_t>(round % max_recvs()),
                groups.back().order.end());
  }
  exchange(link, groups);
}

TEST_P(Groups, SeparateRegistrations_ArriveWhole) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  const std::size_t n = max_recvs();
  constexpr std::size_t kBytes = 5000;
  std::vector<Memory> sources;
  std::vector<Memory> targets;
  for (std::size_t i = 0; i < n; ++i) {
    sources.emplace_back(kBytes, i);
    targets.emplace_back(kBytes, 3 * i);
    sources[i].write(0, kBytes, i);
    targets[i].expect(0, kBytes, i);
  }
  std::vector<Registration> source_mrs;
  std::vector<Registration> target_mrs;
  std::vector<Part> members;
  for (std::size_t i = 0; i < n; ++i) {
    source_mrs.emplace_back(*this, link.send_comm, sources[i].data(), kBytes);
    target_mrs.emplace_back(*this, link.recv_comm, targets[i].data(), kBytes);
    members.push_back({targets[i].data(), kBytes, static_cast<int>(i), target_mrs[i].get()});
  }
  Traffic traffic(net());
  const Operation& recv = traffic.recv(link.recv_comm, members);
  for (std::size_t i = n; i-- > 0;) {
    traffic.send(link.send_comm, {sources[i].data(), kBytes, static_cast<int>(i), source_mrs[i].get()});
  }
  ASSERT_TRUE(traffic.run());
  EXPECT_EQ(recv.sizes, std::vector<int>(n, int{kBytes}));
  for (Memory& target : targets) EXPECT_TRUE(target.intact());
}

TEST_P(Groups, MemberMissing_GroupIsNotDone) {
  TestConnection link = this->link();
  const std::size_t n = max_recvs();
  if (n < 2) GTEST_SKIP() << "maxRecvs is 1";
  Memory source(100 * n);
  Memory target(100 * n);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  Traffic traffic(net());
  std::vector<Part> members;
  for (std::size_t i = 0; i < n; ++i) {
    members.push_back({target.data() + 100 * i, 100, static_cast<int>(i), target_mr.get()});
  }
  const Operation& recv = traffic.recv(link.recv_comm, members);
  for (std::size_t i = n; i-- > 0;) {
    ASSERT_TRUE(traffic.run_for(kQuiet / 4));
    EXPECT_FALSE(recv.done) << "with " << i + 1 << " members missing";
    source.write(100 * i, 100, i);
    target.expect(100 * i, 100, i);
    traffic.send(link.send_comm, {source.data() + 100 * i, 100, static_cast<int>(i), source_mr.get()});
  }
  ASSERT_TRUE(traffic.run());
  EXPECT_EQ(recv.sizes, std::vector<int>(n, 100));
  EXPECT_TRUE(target.intact());
}

// A send whose tag is not in the oldest group gets a null request and no error, even if a later group has the tag.
TEST_P(Groups, TagOfLaterGroup_IsNotAccepted) {
  TestConnection link = this->link();
  Memory source(200);
  Memory target(200);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  source.write(0, 100, 1);
  source.write(100, 100, 2);
  target.expect(0, 100, 1);
  target.expect(100, 100, 2);
  Traffic recvs(net());
  recvs.recv(link.recv_comm, {{target.data(), 100, 11, target_mr.get()}});
  recvs.recv(link.recv_comm, {{target.data() + 100, 100, 22, target_mr.get()}});
  Traffic second(net());
  Operation& early = second.send(link.send_comm, {source.data() + 100, 100, 22, source_mr.get()});
  const auto quiet_end = Clock::now() + kQuiet;
  while (Clock::now() < quiet_end) ASSERT_TRUE(recvs.step() && second.step());
  EXPECT_FALSE(early.posted);
  Traffic first(net());
  first.send(link.send_comm, {source.data(), 100, 11, source_mr.get()});
  ASSERT_TRUE(eventually([&] {
    return !recvs.step() || !first.step() || !second.step() || recvs.open() + first.open() + second.open() == 0;
  }));
  EXPECT_EQ(recvs.open() + first.open() + second.open(), 0U);
  EXPECT_TRUE(target.intact());
}

TEST_P(Groups, MoreThanMaxRecvs_IsRejected) {
  TestConnection link = this->link();
  const std::size_t n = max_recvs() + 1;
  Memory target(n);
  const Registration mr(*this, link.recv_comm, target.data(), target.size());
  std::vector<void*> data(n, target.data());
  std::vector<std::size_t> sizes(n, 1);
  std::vector<int> tags(n, 0);
  std::vector<void*> mhandles(n, mr.get());
  void* request = nullptr;
  EXPECT_NE(net().irecv(link.recv_comm, static_cast<int>(n), data.data(), sizes.data(), tags.data(), mhandles.data(),
                        &request),
            nccl::Result::kSuccess);
  EXPECT_EQ(request, nullptr);
  take_warnings();  // the plugin may log a warning
}

// Mixes group sizes, equal and different tags, orders, and short, empty, small and large members.
TEST_P(MixedTraffic, RandomGroups_ArriveWhole) {
  TestConnection link = this->link();
  const std::size_t max = max_recvs();
  std::mt19937 random(static_cast<std::uint32_t>(100 + version()));
  const auto below = [&](std::size_t limit) {
    return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random);
  };
  for (int round = 0; round < repetitions(3); ++round) {
    std::vector<Group> groups;
    for (int i = 0; i < repetitions(120); ++i) {
      const std::size_t n = below(3) == 0 ? 1 : 1 + below(max);
      Group group{{}, in_order(n)};
      const bool repeat_tags = below(4) == 0;
      for (std::size_t m = 0; m < n; ++m) {
        const std::size_t scale = std::array<std::size_t, 4>{16, 300, 5000, 40'000}[below(4)];
        const std::size_t size = below(6) == 0 ? 0 : below(scale);
        const int tag = static_cast<int>(repeat_tags ? below(2) : 10 * m + below(10));
        group.pieces.push_back({size, size + (below(2) == 0 ? 0 : below(100)), tag});
      }
      if (repeat_tags) {  // then each send can match each member
        for (Piece& piece : group.pieces) piece.capacity = 40'000;
      }
      std::shuffle(group.order.begin(), group.order.end(), random);
      groups.push_back(group);
    }
    exchange(link, groups, {.send_offset = below(100), .recv_offset = below(100), .gap = 1 + below(40)});
  }
}

}  // namespace
}  // namespace conformance
