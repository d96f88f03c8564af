// The contexts of one createContext: in each context one QP to each rank that is spoken to, and one to oneself. Puts,
// gets and signals of one context and one peer are executed in the order of the calls, because they use one QP:
//
//   put     RDMA WRITE
//   signal  FETCH_AND_ADD behind the WRITE: the peer's NIC executes it after everything that was posted before it on
//           this QP, also where packets take different paths. So every signal is a strong one
//   get     RDMA READ
//   flush   RDMA READ of own memory over the QP to oneself: it completes after the writes that have arrived before
//
// Threads: one at a time calls put, get, flush, test and progress of a set. has_error is any thread's. This data path
// takes no lock and, unless something fails, makes no system call, allocates nothing and logs nothing.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/result.h"
#include "net/diagnose/path_facts.h"
#include "net/transfer/memory.h"
#include "rma/failures.h"
#include "rma/memory.h"
#include "rma/peer_ranks.h"
#include "verbs/handles.h"
#include "verbs/port.h"
#include "verbs/qp.h"

namespace verbatim::rma {

class CollComm;
class ContextSet;

// What a call asks for; local and remote are addresses.
struct Operation {
  std::uint64_t local = 0;
  std::uint64_t remote = 0;
  std::uint64_t bytes = 0;
  std::uint64_t signal = 0;  // address of the peer's word
  std::uint64_t signal_value = 0;
  std::uint32_t lkey = 0;
  std::uint32_t rkey = 0;
  std::uint32_t signal_rkey = 0;
  ibv_wr_opcode opcode = IBV_WR_RDMA_WRITE;
  bool has_data = true;
  bool has_signal = false;
};

// A signal's word.
inline constexpr std::uint64_t kSignalBytes = 8;

inline constexpr std::uint32_t kNoSlot = 0xffffffff;

// NCCL's request: a slot of a peer queue.
struct Request {
  enum class State : std::uint8_t { kFree, kPending, kDone };

  ContextSet* set = nullptr;
  std::uint64_t work_id = 0;     // WorkId of its last work request, without entries
  std::uint32_t queue = 0;       // index in the set
  std::uint32_t index = 0;       // in the queue
  std::uint32_t next = kNoSlot;  // free, or held back
  State state = State::kFree;
  bool data_posted = false;  // of one that is held back
  std::uint64_t posted = 0;  // bytes of it
  Operation operation = {};  // for requests that are held back, and for log lines
};

// The QP of one context to one rank.
struct PeerQueue {
  UniqueQp qp;
  std::uint32_t context = 0;
  std::uint32_t peer = 0;  // in ring order, oneself last
  ibv_send_wr data = {};   // formatted once; each call sets what differs
  ibv_send_wr signal = {};
  ibv_sge data_segment = {};
  ibv_sge signal_segment = {};
  std::vector<Request> slots;
  std::uint32_t free_work = 0;  // entries of the send queue
  std::uint32_t free_slot = kNoSlot;
  std::uint32_t held_first = kNoSlot;  // requests that wait for entries of the send queue, in order
  std::uint32_t held_last = kNoSlot;
  std::uint64_t completed = 0;  // operations, and their bytes
  std::uint64_t completed_bytes = 0;
};

// A rank that is spoken to.
struct PeerPath {
  std::uint32_t rank = 0;
  std::string name;                       // "rank 3 on node2 (pid 4711)"
  PathEnd remote;                         // without QP
  std::vector<std::uint32_t> remote_qps;  // by context
  QpPath path;
};

struct ContextSetParts {
  CollComm& owner;
  const Config& config;
  const std::string& host_name;
  PeerRanks& ranks;
  Failures& failures;
  Port port;  // up to date
  std::uint32_t scratch_lkey = 0;
  std::uint64_t scratch = 0;  // address of 8 bytes that atomics and flushes write, and nobody reads
  unsigned max_recvs = 1;     // 32 times as many requests of a context and a peer can be outstanding
};

class ContextSet {
 public:
  // Without QPs: context_setup.h makes them.
  ContextSet(ContextSetParts parts, std::size_t contexts, std::size_t peers);
  ContextSet(const ContextSet&) = delete;
  ContextSet& operator=(const ContextSet&) = delete;

  // `context`, `rank`, offsets and sizes are checked. Null memory is allowed for zero bytes.
  struct Target {
    int context = 0;
    std::uint32_t rank = 0;
  };
  struct Part {
    const Memory* memory = nullptr;
    std::uint64_t offset = 0;
  };
  struct Signal {
    Part word;
    std::uint64_t value = 0;
  };
  // These three are in context_posting.h, so that they are compiled into the functions of the table.
  ErrorKind put(Target target, Part source, std::uint64_t bytes, Part destination, void** request) noexcept;
  ErrorKind put_signal(Target target, Part source, std::uint64_t bytes, Part destination, Signal signal,
                       void** request) noexcept;
  ErrorKind get(Target target, Part remote, std::uint64_t bytes, Part local, void** request) noexcept;
  // *request is nullptr when there is nothing to flush.
  ErrorKind flush(Target target, const Memory* memory, void** request) noexcept;
  static ErrorKind test(Request& request, int* done) noexcept;
  // Polls, and posts what is held back.
  ErrorKind progress() noexcept;
  // Any thread.
  bool has_error() const { return failures().has_failed(); }

  const Failures& failures() const { return parts_.failures; }
  CollComm& owner() const { return parts_.owner; }
  // Of the data path's thread.
  bool has_outstanding() noexcept;
  // Ends all outstanding work. Errors are only logged.
  void abort() const;
  std::size_t qps() const { return queues_.size(); }

 private:
  friend class ContextSetup;

  PeerQueue* find_queue(Target target) noexcept;
  static bool set_data(Operation& operation, std::uint64_t bytes, Part local, Part remote, std::uint32_t rank) noexcept;
  static bool set_signal(Operation& operation, Signal signal, std::uint32_t rank) noexcept;
  // A slot for a request, nullptr if there is none.
  static Request* take_slot(PeerQueue& queue) noexcept;
  // Posts the request of a slot whose operation is set, or holds it back.
  template <bool kHasData, bool kHasSignal>
  ErrorKind start(PeerQueue& queue, Request& slot, void** request) noexcept;
  // Whether a call may post.
  ErrorKind check_call(Target target) noexcept;
  template <bool kHasData, bool kHasSignal>
  static int post_work(PeerQueue& queue, const Operation& operation, std::uint64_t wr_id) noexcept;
  void hold(PeerQueue& queue, Request& request) noexcept;
  void post_held(PeerQueue& queue) noexcept;
  bool post_piece(PeerQueue& queue, Request& request) noexcept;
  void poll() noexcept;
  void complete(const ibv_wc& completion) noexcept;
  ErrorKind check_failure(const Request& request) noexcept;
  ErrorKind check_closed(std::uint32_t rank, std::uint64_t grace_ns) noexcept;
  // Logs why a call is refused: its arguments are wrong.
  ErrorKind refuse(Target target, Part local, Part remote, std::uint64_t bytes) noexcept;
  ErrorKind log_refusal(Target target, const char* what) const noexcept;
  void fail_post(const Request& request, int returned) noexcept;
  void fail_poll() noexcept;
  // The first of `completions` has failed.
  void fail_completion(std::span<const ibv_wc> completions) noexcept;
  Failure completion_failure(const ibv_wc& cause) const;
  bool is_own(const PeerQueue& queue) const { return queue.peer == paths_.size(); }
  PathFacts facts(const PeerQueue& queue) const;
  std::string describe(const PeerQueue& queue) const;

  const ContextSetParts parts_;
  const std::size_t contexts_;
  const std::size_t queues_per_context_;
  const std::uint32_t ranks_;                // of the communicator
  UniqueCq cq_;                              // of all QPs, so that any QP can have any place in the order
  std::vector<PeerQueue> queues_;            // context by context, in each by peer
  std::vector<std::uint32_t> peer_of_rank_;  // kNoSlot: not spoken to
  std::vector<PeerPath> paths_;              // by peer index, without oneself
  std::uint64_t max_message_bytes_ = 0;
  std::uint64_t connected_ns_ = 0;
  std::shared_ptr<const PortCounters> counters_;  // of the port, when the contexts were connected
};

}  // namespace verbatim::rma
