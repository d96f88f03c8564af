//: in verbatim_perf_test

// Checks that the plans of all ranks match each other and stay within their buffers. Uses no plugin.
#include "verbatim-perf/operation.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

namespace verbatim::perf {
namespace {

struct Case {
  OperationKind kind;
  int ranks;
  int channels;
  std::size_t bytes;
  workload::ElementType type = workload::ElementType::kUint32;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const OperationKind kind :
       {OperationKind::kAllReduce, OperationKind::kAllGather, OperationKind::kReduceScatter, OperationKind::kBroadcast,
        OperationKind::kReduce, OperationKind::kAllToAll, OperationKind::kAllToAllV, OperationKind::kGather,
        OperationKind::kScatter, OperationKind::kHypercube, OperationKind::kSendRecv}) {
    for (const int ranks : {1, 2, 3, 5, 8}) {
      const bool is_power_of_two = (ranks & (ranks - 1)) == 0;
      if (kind == OperationKind::kHypercube && !is_power_of_two) continue;
      for (const int channels : {1, 3}) {
        for (const std::size_t bytes : {0UL, 4UL, 100UL, 40'004UL, 123'456UL})
          all.push_back({kind, ranks, channels, bytes});
      }
    }
  }
  for (const OperationKind kind : {OperationKind::kStream, OperationKind::kPingPong, OperationKind::kGrouped}) {
    for (const int channels : {1, 3}) {
      for (const std::size_t bytes : {0UL, 4UL, 100UL, 40'004UL, 123'456UL}) all.push_back({kind, 2, channels, bytes});
    }
  }
  all.push_back({OperationKind::kAllReduce, 4, 2, 99'999, workload::ElementType::kUint8});
  all.push_back({OperationKind::kAllReduce, 4, 2, 99'999, workload::ElementType::kUint64});
  return all;
}

constexpr std::size_t kDepth = 4;
constexpr std::size_t kChunkBytes = 8'000;

class OperationPlan : public testing::TestWithParam<Case> {
 protected:
  OperationPlan() {
    for (int rank = 0; rank < GetParam().ranks; ++rank) {
      operations_.push_back(make_operation(GetParam().kind, {.rank = rank,
                                                             .ranks = GetParam().ranks,
                                                             .channels = GetParam().channels,
                                                             .type = GetParam().type,
                                                             .root = GetParam().ranks / 2,
                                                             .chunk_bytes = kChunkBytes,
                                                             .depth = kDepth,
                                                             .group = 5}));
      extents_.push_back(operations_.back()->extent(GetParam().bytes));
      plans_.push_back(operations_.back()->plan(extents_.back()));
    }
    flows_ = operations_[0]->flows();
  }

  const Lane* lane(int rank, std::size_t flow, bool sends) const {
    for (const Lane& lane : plans_[static_cast<std::size_t>(rank)].lanes) {
      if (lane.flow == flow && lane.sends == sends) return &lane;
    }
    return nullptr;
  }

  std::vector<std::unique_ptr<Operation>> operations_;
  std::vector<Extent> extents_;
  std::vector<Plan> plans_;
  std::vector<Flow> flows_;
};

TEST_P(OperationPlan, AllRanks_AgreeOnFlowsAndExtents) {
  for (std::size_t rank = 1; rank < operations_.size(); ++rank) {
    const std::vector<Flow> flows = operations_[rank]->flows();
    ASSERT_EQ(flows_.size(), flows.size());
    for (std::size_t i = 0; i < flows.size(); ++i) {
      EXPECT_EQ(flows_[i].source, flows[i].source);
      EXPECT_EQ(flows_[i].destination, flows[i].destination);
      EXPECT_EQ(flows_[i].channel, flows[i].channel);
    }
    EXPECT_EQ(extents_[0].bytes, extents_[rank].bytes);
  }
  EXPECT_LE(extents_[0].bytes, GetParam().bytes);
}

TEST_P(OperationPlan, EveryFlow_SendsMatchReceives) {
  for (std::size_t flow = 0; flow < flows_.size(); ++flow) {
    const Lane* const send = lane(flows_[flow].source, flow, true);
    const Lane* const recv = lane(flows_[flow].destination, flow, false);
    ASSERT_EQ(send == nullptr, recv == nullptr);
    if (send == nullptr) continue;
    ASSERT_EQ(send->messages.size(), recv->messages.size());
    ASSERT_EQ(send->messages.size(), send->steps.size());
    ASSERT_EQ(recv->messages.size(), recv->steps.size() * recv->group);
    // Within a group the order does not matter; tags match sends to receives.
    for (std::size_t first = 0; first < recv->messages.size(); first += recv->group) {
      std::map<int, std::size_t> sent;
      for (std::size_t i = first; i < first + recv->group; ++i) sent[send->messages[i].tag] = send->messages[i].bytes;
      ASSERT_EQ(recv->group, sent.size());
      for (std::size_t i = first; i < first + recv->group; ++i) {
        const Message& message = recv->messages[i];
        ASSERT_EQ(1U, sent.count(message.tag));
        EXPECT_EQ(message.bytes, sent[message.tag]);
        EXPECT_GE(message.capacity, message.bytes);
        EXPECT_LE(message.capacity, kChunkBytes);
      }
    }
  }
}

TEST_P(OperationPlan, EveryMessage_StaysInsideBuffers) {
  for (std::size_t rank = 0; rank < plans_.size(); ++rank) {
    const std::size_t bytes[kBuffers] = {extents_[rank].send_bytes, extents_[rank].recv_bytes,
                                         operations_[rank]->staging_bytes()};
    for (const Lane& lane : plans_[rank].lanes) {
      for (const Message& message : lane.messages) {
        EXPECT_LE(message.offset + (lane.sends ? message.bytes : message.capacity),
                  bytes[static_cast<std::size_t>(message.buffer)]);
      }
      for (std::size_t i = 0; i < lane.steps.size(); ++i) {
        if (!lane.steps[i].reduction.wanted) continue;
        EXPECT_LE(lane.steps[i].reduction.offset + lane.messages[i].bytes, extents_[rank].recv_bytes);
      }
    }
  }
}

// Every expected byte is written by a copy, a message or a reduction, and no message writes it twice. All others are
// unchanged.
TEST_P(OperationPlan, EveryExpectedByte_IsWrittenOnce) {
  for (std::size_t rank = 0; rank < plans_.size(); ++rank) {
    std::vector<int> written(extents_[rank].recv_bytes), expected(extents_[rank].recv_bytes);
    std::vector<int> unchanged(extents_[rank].recv_bytes);
    const auto count = [](std::vector<int>& in, std::size_t offset, std::size_t bytes) {
      for (std::size_t i = offset; i < offset + bytes; ++i) ++in.at(i);
    };
    for (const LocalCopy& copy : plans_[rank].copies) count(written, copy.to, copy.bytes);
    std::vector<int> reduced(extents_[rank].recv_bytes);
    for (const Lane& lane : plans_[rank].lanes) {
      if (lane.sends) continue;
      for (const Message& message : lane.messages) {
        if (message.buffer == Buffer::kRecv) count(written, message.offset, message.bytes);
      }
      for (std::size_t i = 0; i < lane.steps.size(); ++i) {
        const Reduction& reduction = lane.steps[i].reduction;
        if (reduction.wanted && !reduction.stays)
          count(reduced, lane.steps[i].reduction.offset, lane.messages[i].bytes);
      }
    }
    for (const Expected& piece : operations_[rank]->expected(extents_[rank], 1)) {
      count(expected, piece.offset, piece.bytes);
    }
    for (const Range& range : operations_[rank]->unchanged(extents_[rank])) count(unchanged, range.offset, range.bytes);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      // reduce_scatter: the other parts of the buffer hold partial results
      if (GetParam().kind == OperationKind::kReduceScatter && expected[i] == 0) continue;
      // all_reduce: the part that this rank reduces last is final and is not received again
      const int final_writes = written[i] > 0 ? written[i] : reduced[i];
      ASSERT_EQ(expected[i], final_writes) << "rank " << rank << ", byte " << i;
      ASSERT_EQ(expected[i], 1 - unchanged[i]) << "rank " << rank << ", byte " << i;
    }
  }
}

// Simulates the plans of all ranks over a network with unlimited buffers: every step of every plan must be reached.
TEST_P(OperationPlan, AllRanksTogether_DoNotDeadlock) {
  struct Running {
    std::size_t started = 0;
  };
  std::vector<std::vector<Running>> running(plans_.size());
  for (std::size_t rank = 0; rank < plans_.size(); ++rank) running[rank].resize(plans_[rank].lanes.size());
  std::map<std::size_t, std::size_t> sent;  // messages on each flow
  for (bool progressed = true; progressed;) {
    progressed = false;
    for (std::size_t rank = 0; rank < plans_.size(); ++rank) {
      for (std::size_t l = 0; l < plans_[rank].lanes.size(); ++l) {
        const Lane& lane = plans_[rank].lanes[l];
        std::size_t& at = running[rank][l].started;
        if (at == lane.steps.size()) continue;
        const Step& step = lane.steps[at];
        if (step.after_lane >= 0 &&
            running[rank][static_cast<std::size_t>(step.after_lane)].started < step.after_count) {
          continue;
        }
        if (!lane.sends && sent[lane.flow] < (at + 1) * lane.group) continue;
        if (lane.sends) ++sent[lane.flow];
        ++at;
        progressed = true;
      }
    }
  }
  for (std::size_t rank = 0; rank < plans_.size(); ++rank) {
    for (std::size_t l = 0; l < plans_[rank].lanes.size(); ++l) {
      EXPECT_EQ(plans_[rank].lanes[l].steps.size(), running[rank][l].started) << "rank " << rank << " lane " << l;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Operations, OperationPlan, testing::ValuesIn(cases()), [](const auto& tested) {
  const Case& c = tested.param;
  return std::string(operation_name(c.kind)) + "_" + std::to_string(c.ranks) + "ranks_" + std::to_string(c.channels) +
         "channels_" + std::to_string(c.bytes) + "bytes_" + workload::element_name(c.type);
});

// doc/PERFORMANCE.md and the functions GetBw of nccl-tests 2.19.6: bus bandwidth over algorithm bandwidth, and the
// bytes of the algorithm bandwidth over the size.
TEST(Bandwidths, EveryOperation_HasThoseOfNcclTests) {
  constexpr std::size_t kBytes = 12'000;  // 4 parts of 3000 bytes, down to 2992
  for (const auto& [kind, factor, algorithm, size] :
       std::vector<std::tuple<OperationKind, double, double, std::size_t>>{
           {OperationKind::kAllReduce, 1.5, 1, 12'000},
           {OperationKind::kAllGather, 0.75, 1, 11'968},
           {OperationKind::kReduceScatter, 0.75, 1, 11'968},
           {OperationKind::kBroadcast, 1, 1, 12'000},
           {OperationKind::kReduce, 1, 1, 12'000},
           {OperationKind::kAllToAll, 0.75, 1, 11'968},
           {OperationKind::kAllToAllV, 0.75, 1, 11'952},
           {OperationKind::kGather, 0.75, 1, 11'968},
           {OperationKind::kScatter, 0.75, 1, 11'968},
           {OperationKind::kHypercube, 1, 0.75, 11'968},
           {OperationKind::kSendRecv, 1, 1, 12'000}}) {
    const auto operation = make_operation(kind, {.rank = 1,
                                                 .ranks = 4,
                                                 .channels = 1,
                                                 .type = workload::ElementType::kFloat,
                                                 .chunk_bytes = kChunkBytes,
                                                 .depth = kDepth,
                                                 .group = 1});
    const Extent extent = operation->extent(kBytes);
    EXPECT_EQ(size, extent.bytes) << operation_name(kind);
    EXPECT_EQ(factor, operation->bus_factor()) << operation_name(kind);
    EXPECT_EQ(algorithm * static_cast<double>(size), operation->algorithm_bytes(extent)) << operation_name(kind);
  }
}

TEST(PartOf, AllParts_CoverTheWholeInUnits) {
  for (const std::size_t bytes : {0UL, 4UL, 8UL, 100UL, 4'000UL}) {
    for (const std::size_t parts : {1UL, 3UL, 7UL}) {
      std::size_t at = 10;
      for (std::size_t i = 0; i < parts; ++i) {
        const Range part = part_of({10, bytes}, parts, i, 4);
        EXPECT_EQ(at, part.offset);
        EXPECT_EQ(0U, part.bytes % 4);
        at += part.bytes;
      }
      EXPECT_EQ(10 + bytes, at);
    }
  }
}

}  // namespace
}  // namespace verbatim::perf
