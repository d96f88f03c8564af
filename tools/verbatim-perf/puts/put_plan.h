// What one rank transfers in an iteration of put, put_signal, get and alltoall_put, and what it receives. Pure
// computations without a plugin or memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "verbatim-perf/operation.h"

namespace verbatim::perf {

// The rank for which a plan is made.
struct PutShape {
  OperationKind operation;
  int rank;
  int ranks;
  int contexts;
  workload::ElementType type;
};

// A put, with or without a signal, or a get.
struct Transfer {
  int context = 0;
  std::uint32_t peer = 0;
  std::size_t local_offset = 0;   // in the send buffer, of a get in the receive buffer
  std::size_t remote_offset = 0;  // in the peer's receive buffer, of a get in its send buffer
  std::size_t bytes = 0;
};

bool has_signals(OperationKind kind);

Extent put_extent(const PutShape& shape, std::size_t bytes);
// The bytes are divided among the contexts. Without signals there is no transfer of zero bytes.
std::vector<Transfer> put_transfers(const PutShape& shape, const Extent& extent);
// The receive buffer after an iteration. The send buffer of a rank contains workload::Elements(type, rank, step).
std::vector<Expected> put_expected(const PutShape& shape, const Extent& extent, std::uint64_t step);

// A rank has two words for each rank and context: one for the signals from there, and one that stays 0.
std::size_t signal_words(const PutShape& shape);
std::size_t signal_word(const PutShape& shape, int source, int context);
// What a signal adds. Odd contexts increment: nccl::kSignalIncrement, which takes no value.
std::uint64_t signal_value(int source, int context);
bool is_increment(int context);
// The ranks that signal to this one.
std::vector<int> signal_sources(const PutShape& shape);

}  // namespace verbatim::perf
