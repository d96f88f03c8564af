// Collectives over a ring. In every round each rank sends one part to the next rank, chunk by chunk, and forwards a
// chunk as soon as it has received it. broadcast and reduce use the ring as a chain that begins or ends at the root.
#include <algorithm>

#include "verbatim-perf/operations.h"

namespace verbatim::perf {
namespace {

class Ring : public Operation {
 public:
  using Operation::Operation;

  std::vector<Flow> flows() const override {
    std::vector<Flow> flows;
    if (shape_.ranks == 1) return flows;
    for (int channel = 0; channel < shape_.channels; ++channel) {
      for (int rank = 0; rank < shape_.ranks; ++rank) flows.push_back({rank, (rank + 1) % shape_.ranks, channel});
    }
    return flows;
  }

 protected:
  std::size_t ranks() const { return static_cast<std::size_t>(shape_.ranks); }
  std::size_t rank() const { return static_cast<std::size_t>(shape_.rank); }
  std::size_t previous() const { return (rank() + ranks() - 1) % ranks(); }
  // The rank that is `back` positions before this one in the ring.
  std::size_t before(std::size_t back) const { return (rank() + 2 * ranks() - back) % ranks(); }

  // The two lanes of a channel, the sending one first.
  void add_lanes(Plan& plan, int channel) const {
    const std::size_t first = static_cast<std::size_t>(channel) * ranks();
    plan.lanes.push_back({.flow = first + rank(), .sends = true, .window = shape_.depth});
    plan.lanes.push_back({.flow = first + previous(), .sends = false, .window = shape_.depth});
  }
  int tag_of_send() const { return shape_.rank; }
  int tag_of_recv() const { return static_cast<int>(previous()); }

  std::size_t slots_bytes() const {
    return static_cast<std::size_t>(shape_.channels) * shape_.depth * shape_.chunk_bytes;
  }
  // The next message of a receiving lane, into a staging slot of one chunk, which is free when the step `depth` steps
  // before is complete.
  Message into_slot(const Lane& lane, int channel, std::size_t bytes) const {
    const std::size_t slot = static_cast<std::size_t>(channel) * shape_.depth + lane.steps.size() % shape_.depth;
    return {Buffer::kStaging, slot * shape_.chunk_bytes, bytes, shape_.chunk_bytes, tag_of_recv()};
  }
};

class AllReduce final : public Ring {
 public:
  using Ring::Ring;

  Extent extent(std::size_t bytes) const override {
    const std::size_t count = bytes / element();
    return {count * element(), count, count * element(), count * element()};
  }

  std::size_t staging_bytes() const override { return slots_bytes(); }
  bool has_result_in_place() const override { return true; }

  double bus_factor() const override { return 2.0 * (shape_.ranks - 1) / shape_.ranks; }

  std::vector<Expected> expected(const Extent& extent, std::uint64_t step) const override {
    std::vector<Expected> all;
    all.push_back(
        {0, extent.bytes, std::make_unique<workload::Reduced>(shape_.type, shape_.reduction, ranks(), step), 0});
    return all;
  }

  Plan plan(const Extent& extent) const override {
    Plan plan;
    if (shape_.ranks == 1) {
      plan.copies.push_back({0, 0, extent.bytes});
      return plan;
    }
    for (int channel = 0; channel < shape_.channels; ++channel) {
      Range share{};
      if (!share_of_channel({0, extent.bytes}, shape_.channels, channel, element(), share)) break;
      add_lanes(plan, channel);
      fill_lanes(plan, channel, share);
    }
    return plan;
  }

 protected:
  bool reduces() const override { return true; }

 private:
  // Rounds 0 to n-2 reduce and scatter: in round s this rank sends part rank-s, and receives and reduces part rank-s-1.
  // Rounds n-1 to 2n-3 gather the results: with s' counted from 0, this rank sends part rank+1-s' and receives part
  // rank-s'.
  void fill_lanes(Plan& plan, int channel, Range share) const {
    const std::size_t send_lane = plan.lanes.size() - 2;
    const std::size_t recv_lane = plan.lanes.size() - 1;
    const std::size_t chunks = chunks_in(part_of(share, ranks(), 0, element()).bytes, shape_.chunk_bytes);
    const std::size_t reduce_rounds = ranks() - 1;
    for (std::size_t round = 0; round < 2 * reduce_rounds; ++round) {
      const bool reduces = round < reduce_rounds;
      const std::size_t out_part = reduces ? before(round) : before(round - reduce_rounds + ranks() - 1);
      const std::size_t in_part = reduces ? before(round + 1) : before(round - reduce_rounds);
      for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
        const Range out = chunk_of(part_of(share, ranks(), out_part, element()), shape_.chunk_bytes, chunk);
        const Range in = chunk_of(part_of(share, ranks(), in_part, element()), shape_.chunk_bytes, chunk);
        add_send(plan.lanes[send_lane], static_cast<int>(recv_lane), out, round, chunk, chunks);
        add_recv(plan.lanes[recv_lane], static_cast<int>(send_lane), in, channel, round, chunk, chunks);
      }
    }
  }

  // A round sends what the round before received. Round 0 sends this rank's own data.
  void add_send(Lane& lane, int recv_lane, Range out, std::size_t round, std::size_t chunk, std::size_t chunks) const {
    lane.messages.push_back(
        {round == 0 ? Buffer::kSend : Buffer::kRecv, out.offset, out.bytes, out.bytes, tag_of_send()});
    if (round == 0) {
      lane.steps.push_back({});
    } else {
      lane.steps.push_back({.after_lane = recv_lane, .after_count = (round - 1) * chunks + chunk + 1});
    }
  }

  // A partial result is received into a staging slot. A final one is received into the receive buffer, where
  // this rank has sent the partial result of the same part from in round `round - (n-1)`: that send must be complete.
  // Round 0 sent from the send buffer, so it need not be.
  void add_recv(Lane& lane, int send_lane, Range in, int channel, std::size_t round, std::size_t chunk,
                std::size_t chunks) const {
    const std::size_t reduce_rounds = ranks() - 1;
    const std::size_t sent_in = round - reduce_rounds;
    if (round < reduce_rounds) {
      lane.messages.push_back(into_slot(lane, channel, in.bytes));
      lane.steps.push_back({.reduction = {.wanted = true,
                                          .offset = in.offset,
                                          .contribution_of = round == 0 ? tag_of_recv() : -1,
                                          .last = round + 1 == reduce_rounds}});
    } else {
      lane.messages.push_back({Buffer::kRecv, in.offset, in.bytes, in.bytes, tag_of_recv()});
      lane.steps.push_back({.after_lane = sent_in == 0 ? -1 : send_lane, .after_count = sent_in * chunks + chunk + 1});
    }
  }
};

class AllGather final : public Ring {
 public:
  using Ring::Ring;

  Extent extent(std::size_t bytes) const override {
    const std::size_t part = part_bytes(bytes);
    return {part * ranks(), part / element(), part, part * ranks()};
  }

  std::size_t in_place_offset(const Extent& extent) const override { return rank() * extent.send_bytes; }
  bool has_result_in_place() const override { return true; }

  double bus_factor() const override { return static_cast<double>(shape_.ranks - 1) / shape_.ranks; }

  std::vector<Expected> expected(const Extent& extent, std::uint64_t step) const override {
    std::vector<Expected> all;
    for (int source = 0; source < shape_.ranks; ++source) {
      all.push_back(
          {static_cast<std::size_t>(source) * extent.send_bytes, extent.send_bytes, contribution(source, step), 0});
    }
    return all;
  }

  // In round s this rank sends the contribution of rank-s and receives that of rank-s-1.
  Plan plan(const Extent& extent) const override {
    Plan plan;
    plan.copies.push_back({0, rank() * extent.send_bytes, extent.send_bytes});
    for (int channel = 0; channel < shape_.channels && shape_.ranks > 1; ++channel) {
      Range share{};
      if (!share_of_channel({0, extent.send_bytes}, shape_.channels, channel, element(), share)) break;
      add_lanes(plan, channel);
      const auto recv_lane = static_cast<int>(plan.lanes.size()) - 1;
      Lane& send = plan.lanes[plan.lanes.size() - 2];
      Lane& recv = plan.lanes[plan.lanes.size() - 1];
      const std::size_t chunks = chunks_in(share.bytes, shape_.chunk_bytes);
      for (std::size_t round = 0; round < ranks() - 1; ++round) {
        for (std::size_t index = 0; index < chunks; ++index) {
          const Range chunk = chunk_of(share, shape_.chunk_bytes, index);
          const std::size_t out = before(round) * extent.send_bytes + chunk.offset;
          const std::size_t in = before(round + 1) * extent.send_bytes + chunk.offset;
          if (round == 0) {
            send.messages.push_back({Buffer::kSend, chunk.offset, chunk.bytes, chunk.bytes, tag_of_send()});
            send.steps.push_back({});
          } else {
            send.messages.push_back({Buffer::kRecv, out, chunk.bytes, chunk.bytes, tag_of_send()});
            send.steps.push_back({.after_lane = recv_lane, .after_count = (round - 1) * chunks + index + 1});
          }
          recv.messages.push_back({Buffer::kRecv, in, chunk.bytes, chunk.bytes, tag_of_recv()});
          recv.steps.push_back({});
        }
      }
    }
    return plan;
  }
};

// The first rounds of all_reduce, over the parts of the ranks. Partial results are in the receive buffer, which is
// therefore as large as the send buffer; the result is where it is in place, too: in the rank's part.
class ReduceScatter final : public Ring {
 public:
  using Ring::Ring;

  Extent extent(std::size_t bytes) const override {
    const std::size_t part = part_bytes(bytes);
    return {part * ranks(), part / element(), part * ranks(), part * ranks()};
  }

  std::size_t staging_bytes() const override { return slots_bytes(); }
  bool has_result_in_place() const override { return true; }
  double bus_factor() const override { return static_cast<double>(shape_.ranks - 1) / shape_.ranks; }

  std::vector<Expected> expected(const Extent& extent, std::uint64_t step) const override {
    const std::size_t part = extent.bytes / ranks();
    std::vector<Expected> all;
    all.push_back({rank() * part, part,
                   std::make_unique<workload::Reduced>(shape_.type, shape_.reduction, ranks(), step), rank() * part});
    return all;
  }
  std::vector<Range> unchanged(const Extent&) const override { return {}; }

  // In round s this rank sends part rank-s-1, and receives and reduces part rank-s-2.
  Plan plan(const Extent& extent) const override {
    const std::size_t part = extent.bytes / ranks();
    Plan plan;
    if (shape_.ranks == 1) plan.copies.push_back({0, 0, part});
    for (int channel = 0; channel < shape_.channels && shape_.ranks > 1; ++channel) {
      Range share{};
      if (!share_of_channel({0, part}, shape_.channels, channel, element(), share)) break;
      add_lanes(plan, channel);
      const auto recv_lane = static_cast<int>(plan.lanes.size()) - 1;
      Lane& send = plan.lanes[plan.lanes.size() - 2];
      Lane& recv = plan.lanes[plan.lanes.size() - 1];
      const std::size_t chunks = chunks_in(share.bytes, shape_.chunk_bytes);
      for (std::size_t round = 0; round < ranks() - 1; ++round) {
        for (std::size_t index = 0; index < chunks; ++index) {
          const Range chunk = chunk_of(share, shape_.chunk_bytes, index);
          const std::size_t out = before(round + 1) * part + chunk.offset;
          send.messages.push_back(
              {round == 0 ? Buffer::kSend : Buffer::kRecv, out, chunk.bytes, chunk.bytes, tag_of_send()});
          send.steps.push_back({.after_lane = round == 0 ? -1 : recv_lane,
                                .after_count = round == 0 ? 0 : (round - 1) * chunks + index + 1});
          recv.messages.push_back(into_slot(recv, channel, chunk.bytes));
          recv.steps.push_back({.reduction = {.wanted = true,
                                              .offset = before(round + 2) * part + chunk.offset,
                                              .contribution_of = round == 0 ? tag_of_recv() : -1,
                                              .last = round + 2 == ranks()}});
        }
      }
    }
    return plan;
  }

 protected:
  bool reduces() const override { return true; }
};

// Each rank sends to the next one what it has received from the previous one, from the first rank of the chain on.
class Chain : public Ring {
 public:
  using Ring::Ring;

  Extent extent(std::size_t bytes) const override {
    const std::size_t count = bytes / element();
    return {count * element(), count, count * element(), count * element()};
  }
  bool has_result_in_place() const override { return true; }

  Plan plan(const Extent& extent) const override {
    Plan plan;
    if (is_root() && copies_at_root()) plan.copies.push_back({0, 0, extent.bytes});
    for (int channel = 0; channel < shape_.channels && shape_.ranks > 1; ++channel) {
      Range share{};
      if (!share_of_channel({0, extent.bytes}, shape_.channels, channel, element(), share)) break;
      const std::size_t first = static_cast<std::size_t>(channel) * ranks();
      Lane send{.flow = first + rank(), .sends = true, .window = shape_.depth};
      Lane recv{.flow = first + previous(), .sends = false, .window = shape_.depth};
      const int recv_lane = position() == 0 ? -1 : static_cast<int>(plan.lanes.size());
      const int send_lane = static_cast<int>(plan.lanes.size()) + (recv_lane < 0 ? 0 : 1);
      const std::size_t chunks = chunks_in(share.bytes, shape_.chunk_bytes);
      for (std::size_t index = 0; index < chunks; ++index) {
        add_chunk(send, recv, chunk_of(share, shape_.chunk_bytes, index), channel, send_lane);
        send.steps.back().after_lane = recv_lane;
        send.steps.back().after_count = recv_lane < 0 ? 0 : index + 1;
      }
      if (position() > 0) plan.lanes.push_back(std::move(recv));
      if (position() + 1 < ranks()) plan.lanes.push_back(std::move(send));
    }
    return plan;
  }

 protected:
  bool is_root() const { return shape_.rank == shape_.root; }
  // How far the rank is behind the first one of the chain.
  virtual std::size_t position() const = 0;
  virtual bool copies_at_root() const = 0;
  // Adds the receive of a chunk, and a send of it without its dependency.
  virtual void add_chunk(Lane& send, Lane& recv, Range chunk, int channel, int send_lane) const = 0;

  std::size_t behind(std::size_t first) const { return (rank() + ranks() - first) % ranks(); }
};

class Broadcast final : public Chain {
 public:
  using Chain::Chain;

  std::vector<Expected> expected(const Extent& extent, std::uint64_t step) const override {
    std::vector<Expected> all;
    all.push_back({0, extent.bytes, contribution(shape_.root, step), 0});
    return all;
  }

 protected:
  std::size_t position() const override { return behind(static_cast<std::size_t>(shape_.root)); }
  bool copies_at_root() const override { return true; }
  void add_chunk(Lane& send, Lane& recv, Range chunk, int, int) const override {
    recv.messages.push_back({Buffer::kRecv, chunk.offset, chunk.bytes, chunk.bytes, tag_of_recv()});
    recv.steps.push_back({});
    send.messages.push_back(
        {is_root() ? Buffer::kSend : Buffer::kRecv, chunk.offset, chunk.bytes, chunk.bytes, tag_of_send()});
    send.steps.push_back({});
  }
};

// Only the root has a result. The others reduce in the staging slots, and leave their receive buffer as it is.
class Reduce final : public Chain {
 public:
  using Chain::Chain;

  std::size_t staging_bytes() const override { return slots_bytes(); }

  std::vector<Expected> expected(const Extent& extent, std::uint64_t step) const override {
    std::vector<Expected> all;
    if (!is_root()) return all;
    all.push_back(
        {0, extent.bytes, std::make_unique<workload::Reduced>(shape_.type, shape_.reduction, ranks(), step), 0});
    return all;
  }

 protected:
  bool reduces() const override { return true; }
  std::size_t position() const override { return behind(static_cast<std::size_t>(shape_.root) + 1); }
  bool copies_at_root() const override { return shape_.ranks == 1; }
  // A slot is free when what it held is sent.
  void add_chunk(Lane& send, Lane& recv, Range chunk, int channel, int send_lane) const override {
    const bool reused = !is_root() && recv.steps.size() >= shape_.depth;
    const std::size_t sent = recv.steps.size() + 1;
    const Message slot = into_slot(recv, channel, chunk.bytes);
    recv.messages.push_back(slot);
    recv.steps.push_back({.after_lane = reused ? send_lane : -1,
                          .after_count = reused ? sent - shape_.depth : 0,
                          .reduction = {.wanted = true,
                                        .offset = chunk.offset,
                                        .stays = !is_root(),
                                        .contribution_of = position() == 1 ? tag_of_recv() : -1,
                                        .last = is_root()}});
    if (position() == 0) {
      send.messages.push_back({Buffer::kSend, chunk.offset, chunk.bytes, chunk.bytes, tag_of_send()});
    } else {
      send.messages.push_back({Buffer::kStaging, slot.offset, chunk.bytes, chunk.bytes, tag_of_send()});
    }
    send.steps.push_back({});
  }
};

}  // namespace

std::unique_ptr<Operation> make_all_reduce(const Shape& shape) {
  return std::make_unique<AllReduce>(shape);
}
std::unique_ptr<Operation> make_all_gather(const Shape& shape) {
  return std::make_unique<AllGather>(shape);
}
std::unique_ptr<Operation> make_reduce_scatter(const Shape& shape) {
  return std::make_unique<ReduceScatter>(shape);
}
std::unique_ptr<Operation> make_broadcast(const Shape& shape) {
  return std::make_unique<Broadcast>(shape);
}
std::unique_ptr<Operation> make_reduce(const Shape& shape) {
  return std::make_unique<Reduce>(shape);
}

}  // namespace verbatim::perf
