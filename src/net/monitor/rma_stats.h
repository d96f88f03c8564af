// What the contexts of an RMA communicator at one rank have carried, and their state: for the state sockets and the
// file of statistics (plugin/STATE.md). RMA fills them in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace verbatim {

// A put with a signal is a put and a signal.
struct RmaCounts {
  std::uint64_t puts = 0;
  std::uint64_t signals = 0;
  std::uint64_t gets = 0;
  std::uint64_t flushes = 0;
};

// One context and one peer.
struct RmaQueueStats {
  std::uint32_t context = 0;
  std::uint32_t peer = 0;  // rank
  std::string peer_host = {};
  std::uint32_t qp = 0;
  std::uint32_t peer_qp = 0;
  std::uint32_t lane = 1;  // in use, from 1; `qp` and `peer_qp` are its QPs
  std::uint32_t lanes = 1;
  RmaCounts posted = {};
  RmaCounts completed = {};
  std::uint64_t put_bytes = 0;  // completed
  std::uint64_t get_bytes = 0;
  std::uint64_t outstanding = 0;  // operations: a put with a signal is one
  std::uint64_t no_progress_ms = 0;
  bool stalled = false;  // a line has reported it
};

// The contexts of one createContext.
struct RmaStats {
  std::uint64_t number = 0;  // of the process, from 1
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  std::uint32_t contexts = 0;
  std::size_t qps = 0;
  std::string device = {};  // "mlx5_0:1"
  bool failed = false;
  std::string error = {};                  // of one that has failed
  std::vector<RmaQueueStats> queues = {};  // those with which an operation was begun
};

// {"number":..,"rank":..,"queues":[..]}
std::string rma_json(const RmaStats& stats);
// What all have completed: {"puts":..,"signals":..,..}
std::string rma_total_json(std::span<const RmaStats> all);

}  // namespace verbatim
