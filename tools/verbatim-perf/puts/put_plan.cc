#include "verbatim-perf/puts/put_plan.h"

#include <memory>
#include <numeric>

namespace verbatim::perf {
namespace {

int rank_after(const PutShape& shape, int distance) {
  return (shape.rank + distance) % shape.ranks;
}

std::unique_ptr<workload::Content> content_of(const PutShape& shape, int rank, std::uint64_t step) {
  return std::make_unique<workload::Elements>(shape.type, static_cast<std::uint64_t>(rank), step);
}

// To one peer: `local` and `remote` have the same size.
void add_transfers(const PutShape& shape, int peer, Range local, std::size_t remote_offset,
                   std::vector<Transfer>& transfers) {
  const std::size_t unit = workload::element_bytes(shape.type);
  for (int context = 0; context < shape.contexts; ++context) {
    const Range part =
        part_of(local, static_cast<std::size_t>(shape.contexts), static_cast<std::size_t>(context), unit);
    if (part.bytes == 0 && !has_signals(shape.operation)) break;
    transfers.push_back({context, static_cast<std::uint32_t>(peer), part.offset,
                         remote_offset + part.offset - local.offset, part.bytes});
  }
}

}  // namespace

bool has_signals(OperationKind kind) {
  return kind == OperationKind::kPutSignal || kind == OperationKind::kAllToAllPut;
}

Extent put_extent(const PutShape& shape, std::size_t bytes) {
  const std::size_t element = workload::element_bytes(shape.type);
  const std::size_t parts = shape.operation == OperationKind::kAllToAllPut ? static_cast<std::size_t>(shape.ranks) : 1;
  const std::size_t count = bytes / element / parts;
  const std::size_t all = count * element * parts;
  return {all, count, all, all};
}

std::vector<Transfer> put_transfers(const PutShape& shape, const Extent& extent) {
  std::vector<Transfer> transfers;
  if (shape.operation != OperationKind::kAllToAllPut) {
    add_transfers(shape, rank_after(shape, 1), {0, extent.bytes}, 0, transfers);
    return transfers;
  }
  const std::size_t each = extent.bytes / static_cast<std::size_t>(shape.ranks);
  for (int distance = 1; distance <= shape.ranks; ++distance) {  // the rank itself comes last
    const int peer = rank_after(shape, distance);
    add_transfers(shape, peer, {static_cast<std::size_t>(peer) * each, each},
                  static_cast<std::size_t>(shape.rank) * each, transfers);
  }
  return transfers;
}

std::vector<Expected> put_expected(const PutShape& shape, const Extent& extent, std::uint64_t step) {
  std::vector<Expected> all;
  if (shape.operation != OperationKind::kAllToAllPut) {
    const int source = rank_after(shape, shape.operation == OperationKind::kGet ? 1 : shape.ranks - 1);
    all.push_back({0, extent.bytes, content_of(shape, source, step), 0});
    return all;
  }
  const std::size_t each = extent.bytes / static_cast<std::size_t>(shape.ranks);
  for (int source = 0; source < shape.ranks; ++source) {
    all.push_back({static_cast<std::size_t>(source) * each, each, content_of(shape, source, step),
                   static_cast<std::size_t>(shape.rank) * each});
  }
  return all;
}

std::size_t signal_words(const PutShape& shape) {
  return std::size_t{2} * static_cast<std::size_t>(shape.ranks) * static_cast<std::size_t>(shape.contexts);
}

std::size_t signal_word(const PutShape& shape, int source, int context) {
  return std::size_t{2} * (static_cast<std::size_t>(source) * static_cast<std::size_t>(shape.contexts) +
                           static_cast<std::size_t>(context));
}

bool is_increment(int context) {
  return context % 2 == 1;
}

std::uint64_t signal_value(int source, int context) {
  return is_increment(context) ? 1 : 3 + static_cast<std::uint64_t>(source);
}

std::vector<int> signal_sources(const PutShape& shape) {
  if (!has_signals(shape.operation)) return {};
  if (shape.operation == OperationKind::kPutSignal) return {rank_after(shape, shape.ranks - 1)};
  std::vector<int> all(static_cast<std::size_t>(shape.ranks));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace verbatim::perf
