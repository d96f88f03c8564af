// The list of requests, which every rank generates from the same seed or reads from a file.
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
  RequestSettings limited = settings();
  limited.sigma = 3;
  limited.max_tokens = 2000;
  for (const Request& request : generate_requests(limited)) {
    EXPECT_LE(1U, request.tokens);
    EXPECT_GE(2000U, request.tokens);
  }
}

TEST(Requests, ManyRequests_UseEveryRankPair) {
  RequestSettings two_by_four = settings();
  two_by_four.prefills = 2;
  two_by_four.engines = 4;
  std::set<std::pair<std::uint32_t, std::uint32_t>> pairs;
  for (const Request& request : generate_requests(two_by_four)) pairs.insert({request.prefill, request.engine});
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
  std::istringstream in("# tokens hit\n100\n\n  200 0.5  # half is a hit\n");
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
    } catch (const std::invalid_argument& error) {
      EXPECT_EQ(0U, std::string(error.what()).find("list:2: ")) << error.what();
    }
  }
}

}  // namespace
}  // namespace verbatim::kv
