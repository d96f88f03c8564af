// The operations, as seen by one rank: their connections, their plan for a given size, and what they must result in.
// Pure computations: no plugin, no memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "verbatim-perf/options.h"
#include "verbatim-perf/plan.h"
#include "workload/content.h"

namespace verbatim::perf {

// Who asks, and how messages are cut.
struct Shape {
  int rank;
  int ranks;
  int channels;
  workload::ElementType type;
  std::size_t chunk_bytes;  // of elements, above 0
  std::size_t depth;        // receives posted ahead
  std::size_t group;        // members of a grouped receive
};

// A size as the operation can carry it: nccl-tests rounds down to whole elements for every rank.
struct Extent {
  std::size_t bytes;  // the size column
  std::size_t count;  // the count column
  std::size_t send_bytes;
  std::size_t recv_bytes;
};

// A piece of the receive buffer and what it must hold afterwards.
struct Expected {
  std::size_t offset;
  std::size_t bytes;
  std::unique_ptr<workload::Content> content;
  std::uint64_t content_offset;
};

class Operation {
 public:
  explicit Operation(const Shape& shape) : shape_(shape) {}
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  virtual ~Operation() = default;

  // Every connection of the job, the same list on every rank.
  virtual std::vector<Flow> flows() const = 0;
  virtual Extent extent(std::size_t bytes) const = 0;
  virtual Plan plan(const Extent& extent) const = 0;
  // The send buffer of a rank holds traffic::Elements(type, rank, step).
  virtual std::vector<Expected> expected(const Extent& extent, std::uint64_t step) const = 0;

  virtual std::size_t staging_bytes() const { return 0; }
  // Bus bandwidth over algorithm bandwidth, as nccl-tests defines it.
  virtual double bus_factor() const { return 1; }
  // Time of the operation over time of an iteration.
  virtual double time_factor() const { return 1; }
  // Whether iterations may overlap: a stream is one.
  virtual bool overlaps() const { return false; }

 protected:
  std::size_t element() const { return workload::element_bytes(shape_.type); }
  std::unique_ptr<workload::Content> contribution(int rank, std::uint64_t step) const;

  const Shape shape_;
};

std::size_t default_chunk_bytes(OperationKind kind);
std::unique_ptr<Operation> make_operation(OperationKind kind, const Shape& shape);

// A run of bytes.
struct Range {
  std::size_t offset;
  std::size_t bytes;
};
// Part `index` of `parts` nearly equal parts, each of whole units; trailing ones may be empty.
Range part_of(Range whole, std::size_t parts, std::size_t index, std::size_t unit);
// The share of a channel; channels that would get less than 4 KiB get nothing while others carry it, and have no
// messages at all: false.
bool share_of_channel(Range whole, int channels, int channel, std::size_t unit, Range& share);
// How many chunks a run takes, at least 1: an empty run is one empty message.
std::size_t chunks_in(std::size_t bytes, std::size_t chunk);
Range chunk_of(Range whole, std::size_t chunk, std::size_t index);

}  // namespace verbatim::perf
