// Puts experts over a plugin's RMA table, in host memory: each tensor goes from where it lies into the new rows of the
// peer, and the last one of an expert carries a signal. A rank has a signal word for each peer. One thread starts and
// tests the puts, as NCCL's progress thread does.
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <deque>

#include "memory/guarded_buffer.h"
#include "ranks/loaded_plugin.h"
#include "ranks/plugin_log.h"
#include "ranks/rma_comm.h"
#include "verbatim-eplb/transport.h"

namespace verbatim::eplb {
namespace {

using ranks::Failure;
using ranks::require;

// The value of *request before a call. NCCL does not clear the variable, so the plugin must write it.
char unwritten_put;

// What the signal of an expert adds.
std::uint64_t signal_value(std::uint32_t expert) {
  return std::uint64_t{expert} + 1;
}

// A rank has a word for the signals of each rank, and behind it one that stays 0.
std::size_t signal_word(std::size_t source) {
  return 2 * source;
}

class RmaTransport final : public Transport {
 public:
  RmaTransport(const Options& options, ranks::CoordinatorConnection& coordinator, Watchdog& watchdog)
      : options_(options),
        coordinator_(coordinator),
        watchdog_(watchdog),
        ranks_(static_cast<std::size_t>(options.job.nranks)),
        words_(*memory_, 2 * ranks_ * sizeof(std::uint64_t)),
        comm_(options.plugin, options.api_version, coordinator.comm_id()),
        peers_(ranks_) {
    std::memset(words_.data(), 0, words_.size());
    counters_.sent.resize(ranks_);
    counters_.received.resize(ranks_);
    constexpr std::size_t kMostPuts = 256;
    most_puts_ = std::min(kMostPuts, std::size_t{nccl::kNetMaxRequests} * static_cast<std::size_t>(comm_.max_recvs()));
  }

  memory::Memory& memory() override { return *memory_; }

  // An RMA comm connects all ranks.
  void connect(const std::set<std::pair<int, int>>&, const std::vector<ranks::Piece>& pieces) override {
    comm_.connect(coordinator_, options_.job.rank, options_.job.nranks, 1);
    pieces_ = pieces;
    for (const ranks::Piece& piece : pieces) handles_.push_back(comm_.register_memory(piece.data, piece.bytes, 0));
    word_handle_ = comm_.register_memory(words_.data(), words_.size(), nccl::kMrForceStrictOrdering);
  }

  void run_group(std::span<const Operation> operations, std::size_t first) override {
    first_ = first;
    std::size_t pending = operations.size();
    for (std::size_t i = 0; i < operations.size(); ++i) add(operations[i], i);
    while (pending > 0) {
      std::size_t completed = 0;
      bool started = false;
      for (std::size_t rank = 0; rank < ranks_; ++rank) {
        started = start_puts(rank) || started;
        completed += complete_puts(rank, operations);
        completed += receive_signals(rank, operations);
      }
      require(comm_.plugin().progress(comm_.contexts()), "rmaProgress");
      pending -= completed;
      if (started || completed > 0) {
        watchdog_.progress();
      } else {
        sched_yield();
      }
    }
  }

  void finish() override {}

  std::string wrong_signals() const override {
    for (std::size_t i = 0; i < 2 * ranks_; ++i) {
      const std::uint64_t expected = i % 2 == 0 ? peers_[i / 2].expected : 0;
      if (word(i) == expected) continue;
      return (i % 2 == 0 ? "the signals of rank " : "the word behind the signals of rank ") + std::to_string(i / 2) +
             " are " + std::to_string(word(i)) + " instead of " + std::to_string(expected);
    }
    return words_.damage() ? "a byte outside of the signal words was written" : "";
  }

  void close() override { comm_.close(); }

  ranks::Json describe() const override {
    ranks::Json json{{"over", "plugin"},
                     {"path", options_.plugin},
                     {"name", std::string(comm_.plugin().name()) + "'s RMA table"},
                     {"api_version", comm_.plugin().api_version()},
                     {"memory", memory_->describe()},
                     {"registered_by", "regMrSym"},
                     {"devices", ranks::Json::array()}};
    for (const netapi::Properties& device : comm_.devices()) json["devices"].push_back(ranks::json_of(device));
    return json;
  }

 private:
  struct Put {
    std::size_t operation;
    std::size_t expert;
    const Part* part;  // null: a signal without data
    std::size_t target_offset;
    bool signals;  // the last put of its operation
  };
  struct Sent {
    void* request;
    Put put;
  };
  struct Expected {
    std::size_t operation;
    std::uint64_t value;  // of the word when the expert has arrived
  };
  struct Peer {
    std::deque<Put> puts;
    std::deque<Sent> sent;
    std::deque<Expected> receives;  // in the order in which the peer puts
    std::uint64_t expected = 0;     // value of its word after all receives so far
  };

  void add(const Operation& operation, std::size_t index) {
    Peer& peer = peers_[static_cast<std::size_t>(operation.peer)];
    if (!operation.sends) {
      peer.expected += signal_value(operation.expert);
      peer.receives.push_back({index, peer.expected});
      return;
    }
    const std::size_t before = peer.puts.size();
    for (std::size_t i = 0; i < operation.parts.size(); ++i) {
      if (operation.parts[i].bytes == 0) continue;
      peer.puts.push_back({index, operation.expert, &operation.parts[i], operation.target_offsets[i], false});
    }
    if (peer.puts.size() == before) peer.puts.push_back({index, operation.expert, nullptr, 0, false});
    peer.puts.back().signals = true;
  }

  bool start_puts(std::size_t rank) {
    Peer& peer = peers_[rank];
    bool started = false;
    while (!peer.puts.empty() && peer.sent.size() < most_puts_) {
      peer.sent.push_back({start(peer.puts.front(), static_cast<std::uint32_t>(rank)), peer.puts.front()});
      peer.puts.pop_front();
      ++counters_.messages;
      started = true;
    }
    return started;
  }

  void* start(const Put& put, std::uint32_t rank) {
    netapi::RmaPart source;
    netapi::RmaPart target;
    std::size_t bytes = 0;
    if (put.part != nullptr) {
      source = {handles_[put.part->piece], static_cast<std::size_t>(put.part->data - pieces_[put.part->piece].data)};
      target = {handles_[kTargetPiece], put.target_offset};
      bytes = put.part->bytes;
    }
    void* request = &unwritten_put;
    if (put.signals) {
      const netapi::RmaSignal signal{
          .word = {word_handle_, signal_word(static_cast<std::size_t>(options_.job.rank)) * sizeof(std::uint64_t)},
          .value = signal_value(static_cast<std::uint32_t>(put.expert))};
      require(comm_.plugin().iput_signal(comm_.contexts(), 0, source, bytes, target, rank, signal, &request),
              "iputSignal");
    } else {
      require(comm_.plugin().iput(comm_.contexts(), 0, source, bytes, target, rank, &request), "iput");
    }
    if (request == &unwritten_put || request == nullptr) throw Failure("a put returned success without a request");
    return request;
  }

  // Returns the number of operations that have completed.
  std::size_t complete_puts(std::size_t rank, std::span<const Operation> operations) {
    Peer& peer = peers_[rank];
    std::size_t completed = 0;
    while (!peer.sent.empty()) {
      int done = 0;
      require(comm_.plugin().test(comm_.coll(), peer.sent.front().request, &done), "test of a put");
      if (done == 0) break;
      const Put put = peer.sent.front().put;
      peer.sent.pop_front();
      if (!put.signals) continue;
      counters_.sent[rank] += operations[put.operation].bytes();
      complete(put.operation);
      ++completed;
    }
    return completed;
  }

  // A word grows in the order of the peer's puts. A wrong amount is found at the end: wrong_signals().
  std::size_t receive_signals(std::size_t rank, std::span<const Operation> operations) {
    Peer& peer = peers_[rank];
    if (peer.receives.empty()) return 0;
    const std::uint64_t value = word(signal_word(rank));
    std::size_t completed = 0;
    while (!peer.receives.empty() && value >= peer.receives.front().value) {
      counters_.received[rank] += operations[peer.receives.front().operation].bytes();
      complete(peer.receives.front().operation);
      peer.receives.pop_front();
      ++completed;
    }
    return completed;
  }

  void complete(std::size_t operation) {
    ++counters_.operations;
    watchdog_.done(first_ + operation);
  }

  std::uint64_t word(std::size_t index) const {
    return __atomic_load_n(reinterpret_cast<const std::uint64_t*>(words_.data()) + index, __ATOMIC_ACQUIRE);
  }

  const Options& options_;
  ranks::CoordinatorConnection& coordinator_;
  Watchdog& watchdog_;
  const std::size_t ranks_;
  // Registered: freed after the plugin.
  const std::unique_ptr<memory::Memory> memory_ = memory::make_host_memory(options_.pages);
  memory::GuardedBuffer words_;
  ranks::RmaComm comm_;
  std::size_t most_puts_ = 0;
  std::vector<ranks::Piece> pieces_;
  std::vector<void*> handles_;  // by piece
  void* word_handle_ = nullptr;
  std::vector<Peer> peers_;
  std::size_t first_ = 0;
};

}  // namespace

std::unique_ptr<Transport> make_rma_transport(const Options& options, ranks::CoordinatorConnection& coordinator,
                                              Watchdog& watchdog) {
  return std::make_unique<RmaTransport>(options, coordinator, watchdog);
}

}  // namespace verbatim::eplb
