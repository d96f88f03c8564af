// The puts, signals, gets and flushes of one RMA communicator, and its ranks, each of which is a process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "fault/dma_buf.h"
#include "netapi/rma.h"
#include "simulation/faults.h"
#include "simulation/job_parts.h"

namespace simulation {

struct Operation {
  enum class Kind { kPut, kPutSignal, kSignal, kGet, kFlush };
  // A place in a window of the rank that is meant.
  struct Place {
    std::size_t window = 0;
    std::size_t offset = 0;
  };

  Kind kind = Kind::kPut;
  std::size_t number = 0;  // among those of its rank
  std::size_t rank = 0;
  std::size_t set = 0;
  std::size_t context = 0;
  std::size_t peer = 0;
  std::size_t size = 0;
  Place source = {};  // of a put at `rank`, of a get at `peer`
  Place target = {};  // the other way round; no other operation has this place
  // Each signal counts in four bits of its own, so that it is known which one has come, and how often. This is the
  // first of them, counted from the first word of `peer`.
  std::size_t bit = 0;
  bool increments = false;
  bool strong = true;    // it comes after all earlier puts of its rank in this context to this peer
  bool is_last = false;  // of its rank in this context to this peer: the gets are done before it begins
};

// Contexts and windows are made by all ranks, in the same order.
struct PutPlan {
  struct Window {
    bool in_gpu_memory = false;      // registered as a dma-buf, so that it is flushed
    std::vector<std::size_t> bytes;  // by rank
  };

  std::size_t ranks = 0;              // 0: no communicator
  int version = 14;                   // of the table
  std::vector<std::size_t> contexts;  // of each set
  std::size_t stride = 1;             // only ranks at multiples of it from oneself are spoken to
  std::vector<Window> windows;        // all but the first are registered while the contexts are in use
  std::vector<std::size_t> words;     // for signals, by rank
  std::size_t under_way = 1;          // requests of a rank in a set at a time
  bool tests_all = true;              // no: contexts are destroyed with requests that are under way
  std::vector<Operation> operations;  // those of a rank and a set in their order
};

constexpr std::size_t kMaxRanks = 4;  // unless `ranks` says how many
PutPlan draw_puts(Draw& draw, std::size_t ranks = 0);
// Beside these ranks, and the operations of a rank in a set behind the first ones. The last signals stay.
void leave_out(PutPlan& plan, std::size_t ranks, std::size_t operations);

// One rank, from init to finalize.
class Rank {
 public:
  // `handles`: one for each rank.
  Rank(netapi::RmaPlugin& net, const PutPlan& plan, std::size_t rank, const Faults& faults, Handle* handles);

  void run();
  const Calls& calls() const { return call_; }
  std::uint64_t bytes_checked() const { return bytes_checked_; }

 private:
  struct Memory {
    explicit Memory(std::size_t bytes) : pages(bytes) {}

    fault::DmaBuf pages;
    std::atomic<void*> mhandle{nullptr};  // when it is registered
  };
  struct Request {
    const Operation* operation;
    void* request;
  };
  // A put or signal of any rank to this one.
  struct Arrival {
    const Operation* operation;
    bool data = false;    // has been checked
    bool signal = false;  // has been seen
  };
  // A thread of its own makes its calls.
  struct Set {
    void* contexts = nullptr;
    std::vector<const Operation*> own;
    std::size_t next = 0;  // the first one that has not begun
    std::vector<Request> requests;
    std::vector<Arrival> arrivals;
    Time moved = 0;  // when something has happened
  };

  bool may_fail() const;
  // The application of this rank makes no more calls but those that close.
  bool has_aborted() const { return faults_.has_aborted(rank_); }
  bool connect(void* instance);
  bool create_sets();
  bool add_memory(Memory& memory, bool in_gpu_memory, std::uint64_t flags);
  void close(void* instance);
  void exchange(Set& set);
  bool begin(Set& set, bool& moved);
  bool may_begin(const Set& set, const Operation& operation) const;
  bool begin_one(const Set& set, const Operation& operation, void*& request);
  bool test(Set& set, bool& moved);
  void look_at_signals(Set& set, bool& moved);
  bool is_done(const Set& set) const;
  // Of a rank that has aborted no more signals come, and nothing of this rank is left that could fail.
  bool waits_in_vain(const Set& set) const;
  void report_missing(const Set& set);
  netapi::RmaPart part(const Operation::Place& place) const;
  // How often the signal has been counted.
  std::size_t count(const Operation& operation) const;
  // After that the place is as before, so that bytes which come again are found.
  void check_and_reset(const Operation& operation);
  void forget_arrived(const Operation& operation);
  void check_signals(bool is_complete);
  void check_windows(bool is_complete);

  netapi::RmaPlugin& net_;
  const PutPlan& plan_;
  const std::size_t rank_;
  const Faults& faults_;
  const Time patience_;
  Handle* const handles_;
  Calls call_;
  void* coll_ = nullptr;
  std::deque<Memory> windows_;
  Memory signals_;
  std::deque<Set> sets_;
  std::atomic<std::size_t> ended_sets_{0};  // that are done, or have failed
  bool has_sets_ = false;                   // with their contexts
  std::atomic<std::uint64_t> bytes_checked_{0};
};

}  // namespace simulation
