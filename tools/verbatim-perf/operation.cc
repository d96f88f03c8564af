#include "verbatim-perf/operation.h"

#include <algorithm>

#include "verbatim-perf/operations.h"

namespace verbatim::perf {
namespace {

constexpr std::size_t kMinChannelBytes = 4096;
constexpr std::size_t kRingChunkBytes = std::size_t{512} << 10;          // NCCL's 4 MiB buffer has 8 steps
constexpr std::size_t kPointToPointChunkBytes = std::size_t{128} << 10;  // NCCL_P2P_NET_CHUNKSIZE
constexpr std::size_t kUnlimitedChunkBytes = std::size_t{1} << 40;

std::size_t divide_up(std::size_t value, std::size_t by) {
  return (value + by - 1) / by;
}

}  // namespace

std::unique_ptr<workload::Content> Operation::contribution(int rank, std::uint64_t step) const {
  const auto source = static_cast<std::uint64_t>(rank);
  if (!reduces()) return std::make_unique<workload::Pattern>(source, step);
  return std::make_unique<workload::Elements>(shape_.type, source, step, shape_.reduction);
}

std::vector<Range> Operation::unchanged(const Extent& extent) const {
  std::vector<Range> all;
  std::size_t at = 0;
  for (const Expected& result : expected(extent, 0)) {
    all.push_back({at, result.offset - at});
    at = result.offset + result.bytes;
  }
  all.push_back({at, extent.recv_bytes - at});
  return all;
}

Range part_of(Range whole, std::size_t parts, std::size_t index, std::size_t unit) {
  const std::size_t each = divide_up(whole.bytes / unit, parts) * unit;
  const std::size_t begin = std::min(whole.bytes, each * index);
  return {whole.offset + begin, std::min(whole.bytes - begin, each)};
}

bool share_of_channel(Range whole, int channels, int channel, std::size_t unit, Range& share) {
  const std::size_t used =
      std::clamp<std::size_t>(whole.bytes / kMinChannelBytes, 1, static_cast<std::size_t>(channels));
  const auto index = static_cast<std::size_t>(channel);
  if (index >= used) return false;
  share = part_of(whole, used, index, unit);
  return true;
}

std::size_t chunks_in(std::size_t bytes, std::size_t chunk) {
  return std::max<std::size_t>(1, divide_up(bytes, chunk));
}

Range chunk_of(Range whole, std::size_t chunk, std::size_t index) {
  const std::size_t begin = std::min(whole.bytes, chunk * index);
  return {whole.offset + begin, std::min(whole.bytes - begin, chunk)};
}

Plan in_place(Plan plan, std::size_t offset) {
  std::erase_if(plan.copies, [&](const LocalCopy& copy) { return copy.from + offset == copy.to; });
  for (Lane& lane : plan.lanes) {
    for (Message& message : lane.messages) {
      if (message.buffer != Buffer::kSend) continue;
      message.buffer = Buffer::kRecv;
      message.offset += offset;
    }
    for (Step& step : lane.steps) step.reduction.own = Buffer::kRecv;
  }
  return plan;
}

std::size_t default_chunk_bytes(OperationKind kind) {
  switch (kind) {
    case OperationKind::kAllReduce:
    case OperationKind::kAllGather:
    case OperationKind::kReduceScatter:
    case OperationKind::kBroadcast:
    case OperationKind::kReduce:
      return kRingChunkBytes;
    case OperationKind::kAllToAll:
    case OperationKind::kAllToAllV:
    case OperationKind::kGather:
    case OperationKind::kScatter:
    case OperationKind::kHypercube:
    case OperationKind::kSendRecv:
      return kPointToPointChunkBytes;
    case OperationKind::kStream:
    case OperationKind::kPingPong:
    case OperationKind::kGrouped:
    case OperationKind::kPut:
    case OperationKind::kPutSignal:
    case OperationKind::kGet:
    case OperationKind::kAllToAllPut:
      return kUnlimitedChunkBytes;
  }
  return kUnlimitedChunkBytes;
}

std::unique_ptr<Operation> make_operation(OperationKind kind, const Shape& shape) {
  switch (kind) {
    case OperationKind::kAllReduce:
      return make_all_reduce(shape);
    case OperationKind::kAllGather:
      return make_all_gather(shape);
    case OperationKind::kReduceScatter:
      return make_reduce_scatter(shape);
    case OperationKind::kBroadcast:
      return make_broadcast(shape);
    case OperationKind::kReduce:
      return make_reduce(shape);
    case OperationKind::kAllToAll:
      return make_all_to_all(shape);
    case OperationKind::kAllToAllV:
      return make_all_to_all_v(shape);
    case OperationKind::kGather:
      return make_gather(shape);
    case OperationKind::kScatter:
      return make_scatter(shape);
    case OperationKind::kHypercube:
      return make_hypercube(shape);
    case OperationKind::kSendRecv:
      return make_sendrecv(shape);
    case OperationKind::kStream:
      return make_stream(shape);
    case OperationKind::kPingPong:
      return make_pingpong(shape);
    case OperationKind::kGrouped:
      return make_grouped(shape);
    case OperationKind::kPut:  // puts/put_plan.h
    case OperationKind::kPutSignal:
    case OperationKind::kGet:
    case OperationKind::kAllToAllPut:
      break;
  }
  return nullptr;
}

}  // namespace verbatim::perf
