// Operations between rank 0 and rank 1 that measure one property of a connection.
#include <algorithm>
#include <numeric>
#include <utility>

#include "verbatim-perf/operations.h"

namespace verbatim::perf {
namespace {

class Pair : public Operation {
 public:
  using Operation::Operation;

  Extent extent(std::size_t bytes) const override {
    const std::size_t count = bytes / element();
    return {count * element(), count, count * element(), count * element()};
  }

 protected:
  bool is_source() const { return shape_.rank == 0; }

  std::vector<Expected> expected_from(int source, const Extent& extent, std::uint64_t step) const {
    std::vector<Expected> all;
    all.push_back({0, extent.bytes, contribution(source, step), 0});
    return all;
  }

  // Adds the chunks of a share to one lane. If `after_lane` is not -1, chunk i waits for chunk i of that lane.
  Lane lane(std::size_t flow, bool sends, Range share, int tag, int after_lane = -1) const {
    Lane lane{.flow = flow, .sends = sends, .window = shape_.depth};
    for (std::size_t index = 0; index < chunks_in(share.bytes, shape_.chunk_bytes); ++index) {
      const Range chunk = chunk_of(share, shape_.chunk_bytes, index);
      lane.messages.push_back({sends ? Buffer::kSend : Buffer::kRecv, chunk.offset, chunk.bytes, chunk.bytes, tag});
      lane.steps.push_back({.after_lane = after_lane, .after_count = index + 1});
    }
    return lane;
  }
};

class Stream final : public Pair {
 public:
  using Pair::Pair;

  std::vector<Flow> flows() const override {
    std::vector<Flow> flows;
    for (int channel = 0; channel < shape_.channels; ++channel) flows.push_back({0, 1, channel});
    return flows;
  }
  std::vector<Expected> expected(const Extent& extent, std::uint64_t step) const override {
    return is_source() ? std::vector<Expected>{} : expected_from(0, extent, step);
  }
  bool overlaps() const override { return true; }

  Plan plan(const Extent& extent) const override {
    Plan plan;
    for (int channel = 0; channel < shape_.channels; ++channel) {
      Range share{};
      if (!share_of_channel({0, extent.bytes}, shape_.channels, channel, element(), share)) break;
      plan.lanes.push_back(lane(static_cast<std::size_t>(channel), is_source(), share, 0));
    }
    return plan;
  }
};

// Rank 0 sends; rank 1 sends the same number of bytes back when it has received all of them.
class PingPong final : public Pair {
 public:
  using Pair::Pair;

  std::vector<Flow> flows() const override {
    std::vector<Flow> flows;
    for (int channel = 0; channel < shape_.channels; ++channel) {
      flows.push_back({0, 1, channel});
      flows.push_back({1, 0, channel});
    }
    return flows;
  }
  std::vector<Expected> expected(const Extent& extent, std::uint64_t step) const override {
    return expected_from(1 - shape_.rank, extent, step);
  }
  double time_factor() const override { return 0.5; }

  Plan plan(const Extent& extent) const override {
    Plan plan;
    for (int channel = 0; channel < shape_.channels; ++channel) {
      Range share{};
      if (!share_of_channel({0, extent.bytes}, shape_.channels, channel, element(), share)) break;
      const std::size_t ping = 2 * static_cast<std::size_t>(channel);
      const auto recv_lane = static_cast<int>(plan.lanes.size());
      plan.lanes.push_back(lane(is_source() ? ping + 1 : ping, false, share, 1 - shape_.rank));
      plan.lanes.push_back(lane(is_source() ? ping : ping + 1, true, share, shape_.rank, is_source() ? -1 : recv_lane));
      for (Step& step : plan.lanes.back().steps) step.after_count = plan.lanes.back().steps.size();
    }
    return plan;
  }
};

// Each iteration is one grouped receive per channel and chunk. The sender sends the members in another order than the
// receiver lists them, and in a different order for each chunk.
class Grouped final : public Pair {
 public:
  using Pair::Pair;

  std::vector<Flow> flows() const override {
    std::vector<Flow> flows;
    for (int channel = 0; channel < shape_.channels; ++channel) flows.push_back({0, 1, channel});
    return flows;
  }
  std::vector<Expected> expected(const Extent& extent, std::uint64_t step) const override {
    return is_source() ? std::vector<Expected>{} : expected_from(0, extent, step);
  }
  bool overlaps() const override { return true; }

  Plan plan(const Extent& extent) const override {
    Plan plan;
    for (int channel = 0; channel < shape_.channels; ++channel) {
      Range share{};
      if (!share_of_channel({0, extent.bytes}, shape_.channels, channel, element(), share)) break;
      plan.lanes.push_back(group_lane(static_cast<std::size_t>(channel), share));
    }
    return plan;
  }

 private:
  static constexpr int kFirstTag = 100;

  Lane group_lane(std::size_t flow, Range share) const {
    const std::size_t n = shape_.group;
    Lane lane{.flow = flow,
              .sends = is_source(),
              .group = is_source() ? 1 : n,
              .window = is_source() ? shape_.depth * n : shape_.depth};
    const std::size_t chunks = chunks_in(part_of(share, n, 0, element()).bytes, shape_.chunk_bytes);
    for (std::size_t index = 0; index < chunks; ++index) {
      for (const std::size_t member : is_source() ? permutation(n, index) : permutation(n, 0)) {
        const Range chunk = chunk_of(part_of(share, n, member, element()), shape_.chunk_bytes, index);
        lane.messages.push_back({is_source() ? Buffer::kSend : Buffer::kRecv, chunk.offset, chunk.bytes, chunk.bytes,
                                 kFirstTag + static_cast<int>(member)});
        if (is_source()) lane.steps.push_back({});
      }
      if (!is_source()) lane.steps.push_back({});
    }
    return lane;
  }

  // The receiver lists the members in the order 0, 1, 2, ... The sender's order starts from the reverse.
  std::vector<std::size_t> permutation(std::size_t n, std::size_t index) const {
    std::vector<std::size_t> order(n);
    std::iota(order.begin(), order.end(), std::size_t{0});
    if (!is_source()) return order;
    std::reverse(order.begin(), order.end());
    std::rotate(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(index % n), order.end());
    for (std::size_t at = 0; at + 2 < n; at += 3) std::swap(order[at], order[at + 2]);
    return order;
  }
};

}  // namespace

std::unique_ptr<Operation> make_stream(const Shape& shape) {
  return std::make_unique<Stream>(shape);
}
std::unique_ptr<Operation> make_pingpong(const Shape& shape) {
  return std::make_unique<PingPong>(shape);
}
std::unique_ptr<Operation> make_grouped(const Shape& shape) {
  return std::make_unique<Grouped>(shape);
}

}  // namespace verbatim::perf
