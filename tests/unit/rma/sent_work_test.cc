// The accounting of packets, also where the PSNs of a QP pass 2^24.
#include "rma/sent_work.h"

#include <gtest/gtest.h>

namespace verbatim::rma {
namespace {

class SentWorkPsns : public testing::TestWithParam<std::uint32_t> {};
INSTANTIATE_TEST_SUITE_P(First, SentWorkPsns, testing::Values(0U, 5U, 0xfffff0U, 0xffffffU));

TEST_P(SentWorkPsns, ExecutedPackets_FollowFromThePsnThatThePeerExpects) {
  SentWork sent(8);
  sent.start(GetParam());
  std::uint64_t end = GetParam();
  for (const std::uint32_t packets : {1U, 20U, 4U}) {
    sent.add({.kind = SentWork::Kind::kPut}, packets);
    end += packets;
    EXPECT_EQ(sent.posted(), end);
  }
  for (std::uint32_t executed = 0; executed <= 25; ++executed) {
    EXPECT_EQ(sent.executed((GetParam() + executed) & kPsnMask), GetParam() + executed);
  }
  EXPECT_GT(sent.executed((GetParam() + 26) & kPsnMask), sent.posted()) << "more than were sent: not plausible";
  EXPECT_GT(sent.executed((GetParam() - 1) & kPsnMask), sent.posted()) << "before the first one: not plausible";
  sent.remove_first();
  sent.remove_first();
  EXPECT_EQ(sent.executed((GetParam() + 21) & kPsnMask), GetParam() + 21);
  EXPECT_EQ(sent[0].end, end);
  // The next use of this lane begins where this one ends.
  const auto next = static_cast<std::uint32_t>(sent.posted()) & kPsnMask;
  sent.start(next);
  EXPECT_EQ(sent.size(), 0U);
  EXPECT_EQ(sent.executed(next), next);
}

}  // namespace
}  // namespace verbatim::rma
