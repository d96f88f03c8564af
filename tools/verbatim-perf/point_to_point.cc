// Operations made of independent messages between ranks.
#include <algorithm>

#include "verbatim-perf/operations.h"

namespace verbatim::perf {
namespace {

// Adds one lane's messages for its share, one chunk per step.
void add_chunks(Lane& lane, Buffer buffer, Range share, std::size_t chunk_bytes, int tag) {
  const std::size_t chunks = chunks_in(share.bytes, chunk_bytes);
  for (std::size_t index = 0; index < chunks; ++index) {
    const Range chunk = chunk_of(share, chunk_bytes, index);
    lane.messages.push_back({buffer, chunk.offset, chunk.bytes, chunk.bytes, tag});
    lane.steps.push_back({});
  }
}

class AllToAll final : public Operation {
 public:
  using Operation::Operation;

  // The peers of a rank come in the order in which NCCL's core visits them: smallest distance first.
  std::vector<Flow> flows() const override {
    std::vector<Flow> flows;
    for (int distance = 1; distance < shape_.ranks; ++distance) {
      for (int channel = 0; channel < shape_.channels; ++channel) {
        for (int rank = 0; rank < shape_.ranks; ++rank) flows.push_back({rank, peer(rank, distance), channel});
      }
    }
    return flows;
  }

  Extent extent(std::size_t bytes) const override {
    const auto ranks = static_cast<std::size_t>(shape_.ranks);
    const std::size_t count = bytes / element() / ranks;
    const std::size_t all = count * element() * ranks;
    return {all, count, all, all};
  }

  double bus_factor() const override { return static_cast<double>(shape_.ranks - 1) / shape_.ranks; }

  std::vector<Expected> expected(const Extent& extent, std::uint64_t step) const override {
    const std::size_t each = extent.count * element();
    std::vector<Expected> all;
    for (int source = 0; source < shape_.ranks; ++source) {
      all.push_back({static_cast<std::size_t>(source) * each, each, contribution(source, step),
                     static_cast<std::size_t>(shape_.rank) * each});
    }
    return all;
  }

  Plan plan(const Extent& extent) const override {
    const std::size_t each = extent.count * element();
    const std::size_t own = static_cast<std::size_t>(shape_.rank) * each;
    Plan plan;
    plan.copies.push_back({own, own, each});
    for (int distance = 1; distance < shape_.ranks; ++distance) {
      const int to = peer(shape_.rank, distance);
      const int from = peer(shape_.rank, shape_.ranks - distance);
      for (int channel = 0; channel < shape_.channels; ++channel) {
        Range out{};
        Range in{};
        if (!share_of_channel({static_cast<std::size_t>(to) * each, each}, shape_.channels, channel, element(), out) ||
            !share_of_channel({static_cast<std::size_t>(from) * each, each}, shape_.channels, channel, element(), in)) {
          break;
        }
        const std::size_t first = index_of_first_flow(distance, channel);
        Lane send{.flow = first + static_cast<std::size_t>(shape_.rank), .sends = true, .window = shape_.depth};
        Lane recv{.flow = first + static_cast<std::size_t>(from), .sends = false, .window = shape_.depth};
        add_chunks(send, Buffer::kSend, out, shape_.chunk_bytes, shape_.rank);
        add_chunks(recv, Buffer::kRecv, in, shape_.chunk_bytes, from);
        plan.lanes.push_back(std::move(send));
        plan.lanes.push_back(std::move(recv));
      }
    }
    return plan;
  }

 private:
  int peer(int rank, int distance) const { return (rank + distance) % shape_.ranks; }

  // The index in flows() of the flow from rank 0 for a distance and channel.
  std::size_t index_of_first_flow(int distance, int channel) const {
    const std::size_t before = static_cast<std::size_t>(distance - 1) * static_cast<std::size_t>(shape_.channels) +
                               static_cast<std::size_t>(channel);
    return before * static_cast<std::size_t>(shape_.ranks);
  }
};

class SendRecv final : public Operation {
 public:
  using Operation::Operation;

  std::vector<Flow> flows() const override {
    std::vector<Flow> flows;
    for (int channel = 0; channel < shape_.channels; ++channel) {
      for (int rank = 0; rank < shape_.ranks; ++rank) flows.push_back({rank, (rank + 1) % shape_.ranks, channel});
    }
    return flows;
  }

  Extent extent(std::size_t bytes) const override {
    const std::size_t count = bytes / element();
    return {count * element(), count, count * element(), count * element()};
  }

  std::vector<Expected> expected(const Extent& extent, std::uint64_t step) const override {
    std::vector<Expected> all;
    all.push_back({0, extent.bytes, contribution(previous(), step), 0});
    return all;
  }

  Plan plan(const Extent& extent) const override {
    Plan plan;
    for (int channel = 0; channel < shape_.channels; ++channel) {
      Range share{};
      if (!share_of_channel({0, extent.bytes}, shape_.channels, channel, element(), share)) break;
      const std::size_t first = static_cast<std::size_t>(channel) * static_cast<std::size_t>(shape_.ranks);
      Lane send{.flow = first + static_cast<std::size_t>(shape_.rank), .sends = true, .window = shape_.depth};
      Lane recv{.flow = first + static_cast<std::size_t>(previous()), .sends = false, .window = shape_.depth};
      add_chunks(send, Buffer::kSend, share, shape_.chunk_bytes, shape_.rank);
      add_chunks(recv, Buffer::kRecv, share, shape_.chunk_bytes, previous());
      plan.lanes.push_back(std::move(send));
      plan.lanes.push_back(std::move(recv));
    }
    return plan;
  }

 private:
  int previous() const { return (shape_.rank + shape_.ranks - 1) % shape_.ranks; }
};

}  // namespace

std::unique_ptr<Operation> make_all_to_all(const Shape& shape) {
  return std::make_unique<AllToAll>(shape);
}
std::unique_ptr<Operation> make_sendrecv(const Shape& shape) {
  return std::make_unique<SendRecv>(shape);
}

}  // namespace verbatim::perf
