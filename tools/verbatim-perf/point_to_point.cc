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

// A connection from each rank to each other one.
class AllPairs : public Operation {
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

  double bus_factor() const override { return static_cast<double>(shape_.ranks - 1) / shape_.ranks; }

 protected:
  int peer(int rank, int distance) const { return (rank + distance) % shape_.ranks; }
  std::size_t ranks() const { return static_cast<std::size_t>(shape_.ranks); }

  // What rank `from` sends to rank `to` over one channel, at both ends.
  Lane lane(int from, int to, int channel) const {
    const auto distance = static_cast<std::size_t>((to - from + shape_.ranks) % shape_.ranks);
    const std::size_t before =
        (distance - 1) * static_cast<std::size_t>(shape_.channels) + static_cast<std::size_t>(channel);
    return {.flow = before * ranks() + static_cast<std::size_t>(from),
            .sends = from == shape_.rank,
            .window = shape_.depth};
  }

  // Adds the lanes of a message to or from another rank, divided among the channels.
  void add_message(Plan& plan, int from, int to, Range range) const {
    const Buffer buffer = from == shape_.rank ? Buffer::kSend : Buffer::kRecv;
    for (int channel = 0; channel < shape_.channels; ++channel) {
      Range share{};
      if (!share_of_channel(range, shape_.channels, channel, element(), share)) break;
      plan.lanes.push_back(lane(from, to, channel));
      add_chunks(plan.lanes.back(), buffer, share, shape_.chunk_bytes, from);
    }
  }
};

class AllToAll : public AllPairs {
 public:
  using AllPairs::AllPairs;

  Extent extent(std::size_t bytes) const override {
    const std::size_t part = part_bytes(bytes);
    std::size_t all = 0;
    for (int to = 0; to < shape_.ranks; ++to) all += bytes_of(0, to, part);
    return {all, part / element(), all, all};
  }

  std::vector<Expected> expected(const Extent& extent, std::uint64_t step) const override {
    const std::size_t part = extent.count * element();
    std::vector<Expected> all;
    for (int source = 0; source < shape_.ranks; ++source) {
      all.push_back({offset_of(source, shape_.rank, part, false), bytes_of(source, shape_.rank, part),
                     contribution(source, step), offset_of(source, shape_.rank, part, true)});
    }
    return all;
  }

  Plan plan(const Extent& extent) const override {
    const std::size_t part = extent.count * element();
    const int self = shape_.rank;
    Plan plan;
    plan.copies.push_back(
        {offset_of(self, self, part, true), offset_of(self, self, part, false), bytes_of(self, self, part)});
    for (int distance = 1; distance < shape_.ranks; ++distance) {
      const int to = peer(self, distance);
      const int from = peer(self, shape_.ranks - distance);
      add_message(plan, self, to, {offset_of(self, to, part, true), bytes_of(self, to, part)});
      add_message(plan, from, self, {offset_of(from, self, part, false), bytes_of(from, self, part)});
    }
    return plan;
  }

 protected:
  // What rank `from` sends to rank `to`; `part` is the mean.
  virtual std::size_t bytes_of(int, int, std::size_t part) const { return part; }

 private:
  // Where it begins in the send buffer of `from`, or in the receive buffer of `to`.
  std::size_t offset_of(int from, int to, std::size_t part, bool sent) const {
    std::size_t offset = 0;
    for (int before = 0; before < (sent ? to : from); ++before) {
      offset += sent ? bytes_of(from, before, part) : bytes_of(before, to, part);
    }
    return offset;
  }
};

// The distribution that nccl-tests generates: rank r sends d shares to rank r+d, modulo the number of ranks, and none
// to itself.
class AllToAllV final : public AllToAll {
 public:
  using AllToAll::AllToAll;

 protected:
  std::size_t bytes_of(int from, int to, std::size_t part) const override {
    if (shape_.ranks == 1) return part;
    const int distance = (to - from + shape_.ranks) % shape_.ranks;
    const double bytes = 2.0 * distance * static_cast<double>(part) / (shape_.ranks - 1);
    return static_cast<std::size_t>(bytes) / kPartUnit * kPartUnit;
  }
};

// One part of each rank, to or from the root.
class Rooted : public AllPairs {
 public:
  using AllPairs::AllPairs;
  bool has_result_in_place() const override { return true; }

 protected:
  bool is_root() const { return shape_.rank == shape_.root; }
  std::size_t part_of_rank(const Extent& extent, int rank) const {
    return static_cast<std::size_t>(rank) * extent.count * element();
  }
};

class Gather final : public Rooted {
 public:
  using Rooted::Rooted;

  Extent extent(std::size_t bytes) const override {
    const std::size_t part = part_bytes(bytes);
    return {part * ranks(), part / element(), part, part * ranks()};
  }
  std::size_t in_place_offset(const Extent& extent) const override { return part_of_rank(extent, shape_.rank); }

  std::vector<Expected> expected(const Extent& extent, std::uint64_t step) const override {
    std::vector<Expected> all;
    for (int source = 0; source < shape_.ranks && is_root(); ++source) {
      all.push_back({part_of_rank(extent, source), extent.send_bytes, contribution(source, step), 0});
    }
    return all;
  }

  Plan plan(const Extent& extent) const override {
    Plan plan;
    if (is_root()) plan.copies.push_back({0, part_of_rank(extent, shape_.rank), extent.send_bytes});
    if (!is_root()) add_message(plan, shape_.rank, shape_.root, {0, extent.send_bytes});
    for (int distance = 1; distance < shape_.ranks && is_root(); ++distance) {
      const int from = peer(shape_.rank, distance);
      add_message(plan, from, shape_.rank, {part_of_rank(extent, from), extent.send_bytes});
    }
    return plan;
  }
};

// A part is received where it is in place, too: in the rank's part of a buffer of all parts.
class Scatter final : public Rooted {
 public:
  using Rooted::Rooted;

  Extent extent(std::size_t bytes) const override {
    const std::size_t part = part_bytes(bytes);
    return {part * ranks(), part / element(), part * ranks(), part * ranks()};
  }

  std::vector<Expected> expected(const Extent& extent, std::uint64_t step) const override {
    const std::size_t own = part_of_rank(extent, shape_.rank);
    std::vector<Expected> all;
    all.push_back({own, extent.bytes / ranks(), contribution(shape_.root, step), own});
    return all;
  }

  Plan plan(const Extent& extent) const override {
    const std::size_t part = extent.bytes / ranks();
    const std::size_t own = part_of_rank(extent, shape_.rank);
    Plan plan;
    if (is_root()) plan.copies.push_back({own, own, part});
    if (!is_root()) add_message(plan, shape_.root, shape_.rank, {own, part});
    for (int distance = 1; distance < shape_.ranks && is_root(); ++distance) {
      const int to = peer(shape_.rank, distance);
      add_message(plan, shape_.rank, to, {part_of_rank(extent, to), part});
    }
    return plan;
  }
};

// all_gather between neighbours in more and more dimensions: in dimension d a rank exchanges the 2^d parts that it has
// with the rank whose number differs in bit d.
class Hypercube final : public Operation {
 public:
  using Operation::Operation;

  std::vector<Flow> flows() const override {
    std::vector<Flow> flows;
    for (int bit = 1; bit < shape_.ranks; bit *= 2) {
      for (int channel = 0; channel < shape_.channels; ++channel) {
        for (int rank = 0; rank < shape_.ranks; ++rank) flows.push_back({rank, rank ^ bit, channel});
      }
    }
    return flows;
  }

  Extent extent(std::size_t bytes) const override {
    const std::size_t part = part_bytes(bytes);
    const auto ranks = static_cast<std::size_t>(shape_.ranks);
    return {part * ranks, part / element(), part, part * ranks};
  }
  std::size_t algorithm_bytes(const Extent& extent) const override { return extent.bytes - extent.send_bytes; }
  std::size_t in_place_offset(const Extent& extent) const override {
    return static_cast<std::size_t>(shape_.rank) * extent.send_bytes;
  }
  bool has_result_in_place() const override { return true; }

  std::vector<Expected> expected(const Extent& extent, std::uint64_t step) const override {
    std::vector<Expected> all;
    for (int source = 0; source < shape_.ranks; ++source) {
      all.push_back(
          {static_cast<std::size_t>(source) * extent.send_bytes, extent.send_bytes, contribution(source, step), 0});
    }
    return all;
  }

  // A channel carries its share of each part. Its lanes of a dimension begin when the one before is complete.
  Plan plan(const Extent& extent) const override {
    Plan plan;
    plan.copies.push_back({0, in_place_offset(extent), extent.send_bytes});
    for (int channel = 0; channel < shape_.channels; ++channel) {
      Range share{};
      if (!share_of_channel({0, extent.send_bytes}, shape_.channels, channel, element(), share)) break;
      int before = -1;  // the lane that receives in the dimension before
      for (int bit = 1, dimension = 0; bit < shape_.ranks; bit *= 2, ++dimension) {
        const int row = dimension * shape_.channels + channel;
        const std::size_t first_flow = static_cast<std::size_t>(row) * static_cast<std::size_t>(shape_.ranks);
        const int neighbour = shape_.rank ^ bit;
        Lane send{.flow = first_flow + static_cast<std::size_t>(shape_.rank), .sends = true, .window = shape_.depth};
        Lane recv{.flow = first_flow + static_cast<std::size_t>(neighbour), .sends = false, .window = shape_.depth};
        for (int part = 0; part < bit; ++part) {
          add_part(send, (shape_.rank & ~(bit - 1)) + part, extent, share, shape_.rank);
          add_part(recv, (neighbour & ~(bit - 1)) + part, extent, share, neighbour);
        }
        if (before >= 0) {
          const std::uint64_t steps = plan.lanes[static_cast<std::size_t>(before)].steps.size();
          for (Lane* const lane : {&send, &recv}) {
            lane->steps.front().after_lane = before;
            lane->steps.front().after_count = steps;
          }
        }
        plan.lanes.push_back(std::move(send));
        plan.lanes.push_back(std::move(recv));
        before = static_cast<int>(plan.lanes.size()) - 1;
      }
    }
    return plan;
  }

 private:
  void add_part(Lane& lane, int rank, const Extent& extent, Range share, int tag) const {
    if (lane.sends && rank == shape_.rank) return add_chunks(lane, Buffer::kSend, share, shape_.chunk_bytes, tag);
    const Range range{static_cast<std::size_t>(rank) * extent.send_bytes + share.offset, share.bytes};
    add_chunks(lane, Buffer::kRecv, range, shape_.chunk_bytes, tag);
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
std::unique_ptr<Operation> make_all_to_all_v(const Shape& shape) {
  return std::make_unique<AllToAllV>(shape);
}
std::unique_ptr<Operation> make_gather(const Shape& shape) {
  return std::make_unique<Gather>(shape);
}
std::unique_ptr<Operation> make_scatter(const Shape& shape) {
  return std::make_unique<Scatter>(shape);
}
std::unique_ptr<Operation> make_hypercube(const Shape& shape) {
  return std::make_unique<Hypercube>(shape);
}
std::unique_ptr<Operation> make_sendrecv(const Shape& shape) {
  return std::make_unique<SendRecv>(shape);
}

}  // namespace verbatim::perf
