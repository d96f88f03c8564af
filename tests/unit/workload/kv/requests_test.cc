// The list of requests that every rank makes for itself.
#include "workload/kv/requests.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace verbatim::kv {
namespace {

RequestSettings settings() {
  return {.count = 10'001, .median_tokens = 1000, .sigma = 0.5, .max_tokens = 100'000, .hit = 0.25, .seed = 3};
}

TEST(Requests, SameSeed_GivesSameLognormalRequests) {
  const auto requests = generate_requests(settings());
  const auto again = generate_requests(settings());
  std::vector<std::uint32_t> tokens;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(requests[i].tokens, again[i].tokens);
    tokens.push_back(requests[i].tokens);
  }
  std::sort(tokens.begin(), tokens.end());
  EXPECT_NEAR(1000, tokens[5000], 30);
  EXPECT_NEAR(1000 * 1.6487, tokens[8413], 70);  // one sigma above the median
}

TEST(Requests, LargeSigma_StaysWithinLimit) {
  RequestSettings cut = settings();
  cut.sigma = 3;
  cut.max_tokens = 2000;
  for (const Request& request : generate_requests(cut)) {
    EXPECT_LE(1U, request.tokens);
    EXPECT_GE(2000U, request.tokens);
  }
}

TEST(Requests, ManyRequests_UseEveryRankPair) {
  RequestSettings many = settings();
  many.prefills = 2;
  many.engines = 4;
  std::set<std::pair<std::uint32_t, std::uint32_t>> pairs;
  for (const Request& request : generate_requests(many)) pairs.insert({request.prefill, request.engine});
  EXPECT_EQ(8U, pairs.size());
}

TEST(Requests, Blocks_RoundUpAndLastIsNoHit) {
  EXPECT_EQ(1U, (Request{.tokens = 64}.blocks(64)));
  EXPECT_EQ(2U, (Request{.tokens = 65}.blocks(64)));
  EXPECT_EQ(0U, (Request{.tokens = 64, .hit = 1}.hit_blocks(64)));
  EXPECT_EQ(9U, (Request{.tokens = 640, .hit = 1}.hit_blocks(64)));
  EXPECT_EQ(2U, (Request{.tokens = 640, .hit = 0.25}.hit_blocks(64)));
}

TEST(Requests, File_IsRead) {
  std::istringstream in("# tokens hit\n100\n\n  200 0.5  # half is there\n");
  const auto requests = read_requests(in, "list", settings());
  ASSERT_EQ(2U, requests.size());
  EXPECT_EQ(100U, requests[0].tokens);
  EXPECT_EQ(0.25, requests[0].hit);
  EXPECT_EQ(200U, requests[1].tokens);
  EXPECT_EQ(0.5, requests[1].hit);
  EXPECT_EQ(1U, requests[1].id);
}

TEST(Requests, MalformedLine_IsRejectedWithLineNumber) {
  for (const char* line : {"many", "0", "-5", "100 x", "100 1.5", "100 0.5 9", "100001", "100 nan"}) {
    std::istringstream in(std::string("64\n") + line + "\n");
    try {
      read_requests(in, "list", settings());
      ADD_FAILURE() << line;
    } catch (const std::invalid_argument& refused) {
      EXPECT_EQ(0U, std::string(refused.what()).find("list:2: ")) << refused.what();
    }
  }
}

}  // namespace
}  // namespace verbatim::kv
