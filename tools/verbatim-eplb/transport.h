// What carries a group of sends and receives between ranks: NCCL, or a net plugin's table without NCCL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ranks/connections.h"
#include "ranks/coordinator_connection.h"
#include "ranks/json.h"
#include "verbatim-eplb/memory.h"
#include "verbatim-eplb/options.h"
#include "verbatim-eplb/watchdog.h"

namespace verbatim::eplb {

// A contiguous piece of an operation.
struct Part {
  std::byte* data;
  std::size_t bytes;
  std::size_t piece;  // index of register_memory()'s pieces
};

// A send to or receive from a peer; over the table a receive of several parts is one grouped receive.
struct Operation {
  bool sends;
  int peer;
  std::uint32_t expert;
  std::uint32_t tensor;  // the first, when there are several parts
  std::vector<Part> parts;

  std::size_t bytes() const;
  std::string to_string() const;
};

class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  // The memory that it can carry.
  virtual Memory& memory() = 0;
  // Before the first group, with every directed pair that has something to say to each other.
  virtual void connect(const std::set<std::pair<int, int>>& pairs, const std::vector<ranks::Piece>& pieces) = 0;
  // Posts all in their order, and returns when all are posted (NCCL) or done (the table).
  // The first of them is the watchdog's operation `first`.
  virtual void run_group(std::span<const Operation> operations, std::size_t first) = 0;
  // Returns when all groups are done.
  virtual void finish() = 0;
  virtual void close() = 0;

  // Bytes that came to each rank from this one and to this one from each, counted as operations end.
  struct Counters {
    std::vector<std::uint64_t> sent;
    std::vector<std::uint64_t> received;
    std::uint64_t operations = 0;
    std::uint64_t messages = 0;          // isends and grouped receives; over NCCL unknown: 0
    std::uint64_t grouped_receives = 0;  // of more than one member
  };
  const Counters& counters() const { return counters_; }
  virtual ranks::Json describe() const = 0;

 protected:
  Counters counters_;
};

std::unique_ptr<Transport> make_plugin_transport(const Options& options, ranks::CoordinatorConnection& coordinator,
                                                 Watchdog& watchdog);
// Throws Failure saying what is missing where there is no GPU, CUDA or NCCL.
std::unique_ptr<Transport> make_nccl_transport(const Options& options, ranks::CoordinatorConnection& coordinator);

}  // namespace verbatim::eplb
