// The operations as one rank runs them: their connections, their plan for a given size, and their expected result.
// These are pure computations without a plugin or memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "verbatim-perf/options.h"
#include "verbatim-perf/plan.h"
#include "workload/content.h"

namespace verbatim::perf {

// The rank for which a plan is made, and how messages are divided.
struct Shape {
  int rank;
  int ranks;
  int channels;
  workload::ElementType type;
  workload::ReductionKind reduction = workload::ReductionKind::kSum;
  int root = 0;
  std::size_t chunk_bytes;  // whole elements, above 0
  std::size_t depth;        // receives posted ahead
  std::size_t group;        // members of a grouped receive
};

// A size rounded as nccl-tests does: down to whole elements, and if every rank has a part, to parts of 16 bytes.
struct Extent {
  std::size_t bytes;  // the size column of the table
  std::size_t count;  // the count column of the table
  std::size_t send_bytes;
  std::size_t recv_bytes;
};

// A range of the receive buffer and its expected content.
struct Expected {
  std::size_t offset;
  std::size_t bytes;
  std::unique_ptr<workload::Content> content;
  std::uint64_t content_offset;
};

// A range of bytes in a buffer.
struct Range {
  std::size_t offset;
  std::size_t bytes;
};

class Operation {
 public:
  explicit Operation(const Shape& shape) : shape_(shape) {}
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  virtual ~Operation() = default;

  // All connections of the job. The list is the same on every rank.
  virtual std::vector<Flow> flows() const = 0;
  virtual Extent extent(std::size_t bytes) const = 0;
  virtual Plan plan(const Extent& extent) const = 0;
  // The result, in ascending order. The send buffer of a rank contains contribution(rank, step).
  virtual std::vector<Expected> expected(const Extent& extent, std::uint64_t step) const = 0;
  // What of the receive buffer no message may change: all that is not expected.
  virtual std::vector<Range> unchanged(const Extent& extent) const;

  virtual std::size_t staging_bytes() const { return 0; }
  // In place: where the send buffer begins in the receive buffer.
  virtual std::size_t in_place_offset(const Extent&) const { return 0; }
  // Whether the result in place is defined: not if messages overwrite what is still to be sent. As in nccl-tests.
  virtual bool has_result_in_place() const { return false; }
  // Bus bandwidth over algorithm bandwidth, as nccl-tests defines it.
  virtual double bus_factor() const { return 1; }
  // The bytes of the algorithm bandwidth.
  virtual std::size_t algorithm_bytes(const Extent& extent) const { return extent.bytes; }
  // The time to report, as a factor of the time of one iteration.
  virtual double time_factor() const { return 1; }
  // Whether iterations may overlap, as in a continuous stream of messages.
  virtual bool overlaps() const { return false; }

  // What a rank sends: numbers if they are reduced, otherwise any bytes.
  std::unique_ptr<workload::Content> contribution(int rank, std::uint64_t step) const;
  Arithmetic arithmetic() const { return {shape_.type, shape_.reduction, shape_.rank, shape_.ranks}; }

 protected:
  static constexpr std::size_t kPartUnit = 16;  // as in nccl-tests

  virtual bool reduces() const { return false; }
  std::size_t element() const { return workload::element_bytes(shape_.type); }
  // The bytes of one rank's part of `bytes`.
  std::size_t part_bytes(std::size_t bytes) const {
    return bytes / element() / static_cast<std::size_t>(shape_.ranks) * element() / kPartUnit * kPartUnit;
  }

  const Shape shape_;
};

std::size_t default_chunk_bytes(OperationKind kind);
std::unique_ptr<Operation> make_operation(OperationKind kind, const Shape& shape);

// Part `index` of `parts` nearly equal parts. Each part is a multiple of `unit`; the last parts may be empty.
Range part_of(Range whole, std::size_t parts, std::size_t index, std::size_t unit);
// The share of one channel. A message is divided among only so many channels that each gets at least 4 KiB; returns
// false for a channel that gets no share and has no messages.
bool share_of_channel(Range whole, int channels, int channel, std::size_t unit, Range& share);
// The number of chunks of a range, at least 1: an empty range is one empty message.
std::size_t chunks_in(std::size_t bytes, std::size_t chunk);
Range chunk_of(Range whole, std::size_t chunk, std::size_t index);

}  // namespace verbatim::perf
