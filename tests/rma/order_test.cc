// Every QP of every rank is at the position that the formula gives.
//: program rma_order sources=ranks.cc link=netapi,base,threads,gtest
//: all SOFTVERBS_MAX_QP=16384 SOFTVERBS_DEVICES=8 VERBATIM_MAX_RECVS=1
//: test rma-order filter=*/8_*
//: test rma-order-32-ranks full filter=*/32_*

// The QPs of all contexts by number: staggered k * P + r, native r * K + k, those to oneself last.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "ranks.h"

namespace rma_test {
namespace {

struct DumpedQueue {
  std::uint64_t number = 0;
  std::uint64_t peer = 0;
  std::uint64_t context = 0;
  std::uint64_t position = 0;
};

std::uint64_t field(const std::string& line, const std::string& name) {
  const std::size_t at = line.find("\"" + name + "\":");
  EXPECT_NE(at, std::string::npos) << name << " is missing in " << line;
  return at == std::string::npos ? 0 : std::strtoull(line.c_str() + at + name.size() + 3, nullptr, 10);
}

class RmaOrder : public ::testing::TestWithParam<std::tuple<int, int, const char*>> {
 protected:
  // The QPs of each rank, by rising number.
  std::map<std::uint64_t, std::vector<DumpedQueue>> connect(int ranks, int contexts) {
    const std::string file =
        (std::filesystem::temp_directory_path() / ("rma-order-" + std::to_string(::getpid()))).string();
    ::setenv("VERBATIM_QP_DUMP", file.c_str(), 1);
    Ranks(ranks, 0).run_connected({.contexts = contexts}, [](Rank&) {});
    ::unsetenv("VERBATIM_QP_DUMP");
    std::map<std::uint64_t, std::vector<DumpedQueue>> by_rank;
    std::ifstream lines(file);
    for (std::string line; std::getline(lines, line);) {
      by_rank[field(line, "rank")].push_back(
          {field(line, "qpn"), field(line, "peer"), field(line, "context"), field(line, "position")});
    }
    std::filesystem::remove(file);
    for (auto& [rank, queues] : by_rank) {
      std::sort(queues.begin(), queues.end(),
                [](const DumpedQueue& a, const DumpedQueue& b) { return a.number < b.number; });
    }
    return by_rank;
  }
};
INSTANTIATE_TEST_SUITE_P(Rma, RmaOrder,
                         ::testing::Combine(::testing::Values(8, 32), ::testing::Values(1, 4, 16),
                                            ::testing::Values("staggered", "native")),
                         [](const auto& param) {
                           return std::to_string(std::get<0>(param.param)) + "_" +
                                  std::to_string(std::get<1>(param.param)) + "_" + std::get<2>(param.param);
                         });

TEST_P(RmaOrder, QueuePairs_HaveThePositionsOfTheFormula) {
  const auto [ranks, contexts, order] = GetParam();
  ::setenv("VERBATIM_QP_ORDER", order, 1);
  const auto by_rank = connect(ranks, contexts);
  ::unsetenv("VERBATIM_QP_ORDER");
  const auto peers = static_cast<std::uint64_t>(ranks - 1);
  const auto count = static_cast<std::uint64_t>(contexts);
  ASSERT_EQ(by_rank.size(), peers + 1);
  for (const auto& [rank, queues] : by_rank) {
    ASSERT_EQ(queues.size(), count * (peers + 1));
    for (std::uint64_t place = 0; place < queues.size(); ++place) {
      const bool native = std::string(order) == "native";
      std::uint64_t context = native ? place % count : place / peers;
      std::uint64_t peer = (rank + 1 + (native ? place / count : place % peers)) % (peers + 1);
      if (place >= count * peers) {
        context = place - count * peers;
        peer = rank;
      }
      EXPECT_EQ(queues[place].context, context) << "rank " << rank << ", place " << place;
      EXPECT_EQ(queues[place].peer, peer) << "rank " << rank << ", place " << place;
      EXPECT_EQ(queues[place].position, place) << "rank " << rank;
    }
  }
}

}  // namespace
}  // namespace rma_test
