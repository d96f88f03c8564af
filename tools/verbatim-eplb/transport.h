// Runs a group of sends and receives between ranks, over NCCL or over a net plugin's table without NCCL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "memory/memory.h"
#include "ranks/connections.h"
#include "ranks/coordinator_connection.h"
#include "ranks/json.h"
#include "verbatim-eplb/options.h"
#include "verbatim-eplb/watchdog.h"

namespace verbatim::eplb {

// A contiguous range of an operation.
struct Part {
  std::byte* data;
  std::size_t bytes;
  std::size_t piece;  // index into the memory passed to connect()
};

// The piece into which --mode put puts: the new rows.
constexpr std::size_t kTargetPiece = 1;

// A send to or a receive from a peer. With --mode put a send is a put of each part, and a receive waits for a signal.
// Over the plugin's table a receive of several parts is one grouped receive.
struct Operation {
  bool sends;
  int peer;
  std::uint32_t expert;
  std::uint32_t tensor;  // with several parts: the first one
  std::vector<Part> parts;
  std::vector<std::size_t> target_offsets = {};  // of a put, by part: in the peer's piece kTargetPiece

  std::size_t bytes() const;
  std::string to_string() const;
};

class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  // The kind of memory that this transport can send from and receive into.
  virtual memory::Memory& memory() = 0;
  // Must be called before the first group. `pairs` has every directed pair with a transfer.
  virtual void connect(const std::set<std::pair<int, int>>& pairs, const std::vector<ranks::Piece>& pieces) = 0;
  // Posts all operations in their order. Returns when all are posted (NCCL) or complete (plugin's table). `first` is
  // the watchdog's number of the first operation.
  virtual void run_group(std::span<const Operation> operations, std::size_t first) = 0;
  // Returns when all groups are complete.
  virtual void finish() = 0;
  virtual void close() = 0;

  // Bytes sent to and received from each rank, counted when operations complete (over NCCL: when they are posted).
  struct Counters {
    std::vector<std::uint64_t> sent;
    std::vector<std::uint64_t> received;
    std::uint64_t operations = 0;
    std::uint64_t messages = 0;          // isends and irecvs; over NCCL not known: 0
    std::uint64_t grouped_receives = 0;  // with more than one member
  };
  const Counters& counters() const { return counters_; }
  // With --mode put, when all ranks have finished: which signal has a wrong value. Empty: none.
  virtual std::string wrong_signals() const { return {}; }
  virtual ranks::Json describe() const = 0;

 protected:
  Counters counters_;
};

std::unique_ptr<Transport> make_plugin_transport(const Options& options, ranks::CoordinatorConnection& coordinator,
                                                 Watchdog& watchdog);
// Both for --mode put. The first throws Failure when the plugin offers no RMA table.
std::unique_ptr<Transport> make_rma_transport(const Options& options, ranks::CoordinatorConnection& coordinator,
                                              Watchdog& watchdog);
std::unique_ptr<Transport> make_nccl_put_transport(const Options& options, ranks::CoordinatorConnection& coordinator);
// What describe() says of a transport over NCCL.
ranks::Json describe_nccl(const std::string& version, const memory::Memory& memory);
// Throws Failure that names what is missing when there is no GPU, CUDA or NCCL.
std::unique_ptr<Transport> make_nccl_transport(const Options& options, ranks::CoordinatorConnection& coordinator);

}  // namespace verbatim::eplb
