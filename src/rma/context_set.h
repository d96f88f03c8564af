// The contexts of one createContext: in each context one QP to each rank that is spoken to, and one to oneself. Puts,
// gets and signals of one context and one peer are executed in the order of the calls, because they use one QP:
//
//   put     RDMA WRITE
//   signal  FETCH_AND_ADD behind the WRITE: the peer's NIC executes it after everything that was posted before it on
//           this QP, also where packets take different paths. So every signal is a strong one
//   get     RDMA READ
//   flush   RDMA READ of own memory over the QP to oneself: it completes after the writes that have arrived before
//
// They are posted by the next test or progress of the set, by a call for another QP, or when a batch is full, so that a
// burst to one peer needs one doorbell. With several lanes (failover.h) each is also remembered until it is
// acknowledged, and a flush reads over the ports of all lanes: nobody knows by which one the peer's bytes came.
//
// Threads: one at a time calls put, get, flush, test and progress of a set. has_error is any thread's. This data path
// takes no lock and, unless something fails, makes no system call, allocates nothing and logs nothing.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/result.h"
#include "net/diagnose/path_facts.h"
#include "net/transfer/memory.h"
#include "net/transfer/single_writer.h"
#include "rma/failover.h"
#include "rma/failures.h"
#include "rma/memory.h"
#include "rma/peer_ranks.h"
#include "rma/send_batch.h"
#include "rma/sent_work.h"
#include "verbs/handles.h"
#include "verbs/port.h"
#include "verbs/qp.h"

namespace verbatim::rma {

class CollComm;
class ContextSet;

enum class OperationKind : std::uint8_t { kPut, kPutSignal, kSignal, kGet, kFlush };
inline constexpr std::size_t kOperationKinds = 5;

constexpr bool has_signal(OperationKind kind) {
  return kind == OperationKind::kPutSignal || kind == OperationKind::kSignal;
}
constexpr bool reads(OperationKind kind) {
  return kind == OperationKind::kGet || kind == OperationKind::kFlush;
}
constexpr std::uint8_t entries_of(OperationKind kind) {
  return kind == OperationKind::kPutSignal ? 2 : 1;
}

// A signal's word.
inline constexpr std::uint64_t kSignalBytes = 8;

inline constexpr std::uint32_t kNoPeer = 0xffffffff;

// A place in a rank's memory.
struct Part {
  const Memory* memory = nullptr;
  std::uint64_t offset = 0;
};

// What is asked for. `local` and `remote` have no meaning for zero bytes.
struct Call {
  struct Target {
    int context = 0;
    std::uint32_t rank = 0;
    bool operator==(const Target&) const = default;
  };
  struct Signal {
    Part word;
    std::uint64_t value = 0;
  };
  Target target;
  OperationKind kind = OperationKind::kPut;
  Part local = {};
  Part remote = {};
  std::uint64_t bytes = 0;
  Signal signal = {};
};

// The same with addresses and keys.
struct Operation {
  std::uint64_t local = 0;
  std::uint64_t remote = 0;
  std::uint64_t bytes = 0;
  std::uint64_t signal = 0;  // address of the peer's word
  std::uint64_t signal_value = 0;
  std::uint32_t lkey = 0;
  std::uint32_t rkey = 0;
  std::uint32_t signal_rkey = 0;
  // For the keys of further lanes; not set on the short path.
  const Memory* local_memory = nullptr;
  const Memory* remote_memory = nullptr;
  const Memory* signal_memory = nullptr;
};

// The operations of one context and one peer. The thread of the data path counts, any thread may read.
struct QueueCounts {
  using ByKind = std::array<SingleWriter<std::uint64_t>, kOperationKinds>;

  ByKind begun;                        // by put, get, ...: they may still be held back, or wait in the batch
  ByKind completed;                    // as the device has reported, tested or not
  ByKind bytes;                        // of those
  SingleWriter<std::uint64_t> pieces;  // work requests of requests that were held back, which the device has completed

  // Read first, `completed` is not larger than `begun`.
  std::uint64_t all_completed() const { return sum(completed); }
  std::uint64_t all_begun() const { return sum(begun); }
  std::uint64_t all_bytes() const { return sum(bytes); }

 private:
  static std::uint64_t sum(const ByKind& counts) {
    std::uint64_t all = 0;
    for (const SingleWriter<std::uint64_t>& count : counts) all += count;
    return all;
  }
};

// NCCL's request: a slot of a peer queue.
struct Request {
  enum class State : std::uint8_t { kFree, kPending, kDone };

  ContextSet* set = nullptr;
  PeerQueue* queue = nullptr;
  Request* next = nullptr;  // free, or held back
  std::uint64_t bytes = 0;
  struct Work {  // set with one instruction
    State state = State::kFree;
    OperationKind kind = OperationKind::kPut;
    std::uint8_t entries = 0;    // of the send queue
    bool signal_posted = false;  // of one that is held back
  };
  Work work = {};
  std::uint32_t unread = 0;  // of a flush over several ports: those over which its READ is not posted, one bit each
  // Of one that is held back because the send queue has no room for it, or because it has several pieces.
  std::uint64_t posted = 0;  // bytes; of a flush over several ports: READs that have not completed
  Operation operation = {};
};

// The QPs of one context to one rank: one for each lane.
struct PeerQueue {
  UniqueQp qp;  // of the first lane
  std::uint32_t context = 0;
  std::uint32_t peer = 0;       // in ring order, oneself last
  std::uint32_t free_work = 0;  // entries of the send queue; 0 while requests are held back
  std::uint32_t held_work = 0;  // the free entries then
  Request* free_slot = nullptr;
  Request* held_first = nullptr;  // requests that wait for entries of the send queue, in order
  Request* held_last = nullptr;
  QueueCounts counts;
  std::vector<Request> slots;
  std::vector<UniqueQp> further_qps;   // of the other lanes
  ibv_qp* active = nullptr;            // of the lane in use
  std::atomic<std::uint32_t> lane{0};  // in use; the data path's thread writes it
  bool left_lane = false;              // `lane` was left: the next post needs one
  bool flushes_ports = false;          // to oneself, in a set with several lanes
  std::uint8_t packet_shift = 0;       // of the lane: a packet carries at most 2^packet_shift bytes
  std::unique_ptr<SentWork> sent;      // in a set with several lanes

  ibv_qp* qp_of(std::uint32_t which) const { return which == 0 ? qp.get() : further_qps[which - 1].get(); }
};

// A lane to one rank.
struct LanePath {
  PathEnd remote;                  // without QP
  QpConnection connection;         // as it was at set-up; the QP and the PSNs are not in it
  std::vector<wire::HelloQp> qps;  // by context
};

// A rank that is spoken to.
struct PeerPath {
  std::uint32_t rank = 0;
  std::string name;       // "rank 3 on node2 (pid 4711)"
  std::uint32_t psn = 0;  // of the first packet that its QPs expect
  std::vector<LanePath> lanes;
};

struct ContextSetParts {
  CollComm& owner;
  const Config& config;
  const std::string& host_name;
  PeerRanks& ranks;
  Failures& failures;
  std::uint32_t number = 0;               // of the set in its communicator, the same at all ranks
  std::vector<Port> ports;                // own ones, up to date: the first is that of the device
  std::vector<std::uint8_t> port_counts;  // by rank
  // Of the communicator's ports: 8 bytes that atomics and flushes write, and nobody reads.
  const ControlMemory& scratch;
  unsigned max_recvs = 1;  // 32 times as many requests of a context and a peer can be outstanding
};

class ContextSet {
 public:
  // Without QPs: context_setup.h makes them.
  ContextSet(ContextSetParts parts, std::size_t contexts, std::size_t peers);
  ContextSet(const ContextSet&) = delete;
  ContextSet& operator=(const ContextSet&) = delete;

  // `context`, `rank`, offsets and sizes are checked. Null memory is allowed for zero bytes.
  using Target = Call::Target;
  using Part = rma::Part;
  using Signal = Call::Signal;
  // put, put_signal and test are in context_posting.h, so that they are compiled into the functions of the table. The
  // arguments of a put are in the table's order: what is not as usual is then a jump to put_unusual.
  ErrorKind put(int context, std::uint64_t source_offset, const Memory* source, std::uint64_t bytes,
                std::uint64_t target_offset, const Memory* target, std::uint32_t rank, void** request) noexcept;
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
  // Of the data path's thread. Waits until everything that was called for is done, also what nobody has tested. False:
  // the deadline has passed, or the communicator has failed.
  bool finish(std::uint64_t deadline_ns) noexcept;
  // Ends all outstanding work. Errors are only logged.
  void abort() const;

  // Any thread.
  std::span<const PeerQueue> queues() const { return queues_; }
  std::uint32_t contexts() const { return contexts_; }
  std::uint32_t own_rank() const { return parts_.ranks.rank(); }
  std::uint32_t ranks() const { return ranks_; }
  std::uint32_t number() const { return parts_.number; }
  const Port& port() const { return parts_.ports.front(); }
  const Port& lane_port(std::uint32_t lane) const { return parts_.ports[lane % parts_.ports.size()]; }
  // By peer: that of oneself is the last.
  const PeerQueue& queue_at(std::uint32_t context, std::uint32_t peer) const {
    return queues_[context * queues_per_context_ + peer];
  }
  bool is_own(std::uint32_t peer) const { return peer == paths_.size(); }
  // "rank 3 on node2 (pid 4711)", "itself".
  const char* name_of_peer(std::uint32_t peer) const { return is_own(peer) ? "itself" : paths_[peer].name.c_str(); }
  // nullptr: there is one lane to each rank.
  Failover* failover() const { return failover_.get(); }
  ibv_mtu lane_mtu(const PeerQueue& queue, std::uint32_t lane) const;
  // For flushes over the port of a lane to oneself; nullptr: there is one lane to each rank.
  ibv_qp* flush_qp(std::uint32_t lane) const { return flush_qps_.empty() ? nullptr : flush_qps_[lane].get(); }
  // QPs of all lanes.
  std::size_t qps() const;
  // kNoPeer: not spoken to, or oneself.
  std::uint32_t peer_of(std::uint32_t rank) const { return rank == own_rank() ? kNoPeer : peer_of_rank_[rank]; }
  // Of a rank that is spoken to, not of oneself.
  const PeerPath& path_of(const PeerQueue& queue) const { return paths_[queue.peer]; }
  // What is known of the queue's path, on the lane in use or another one, without asking the device, which may hang.
  PathFacts known_facts(const PeerQueue& queue, std::optional<std::uint32_t> of_lane = {}) const;
  // "rank 0 to rank 3 on node2 (pid 4711), RMA context 1".
  std::string describe(const PeerQueue& queue) const;
  // Whether the application has polled since the last call.
  bool take_polled() const { return polled_.take(); }

 private:
  friend class ContextSetup;

  static constexpr int kPollBatch = 16;

  // nullptr: no such context, or a rank that is not spoken to.
  PeerQueue* find_queue(Target target) const noexcept;
  static bool contain(std::uint64_t bytes, Part local, Part remote, std::uint32_t rank) noexcept;
  static bool contains_word(Part word, std::uint32_t rank) noexcept;
  static void set_data(Operation& operation, std::uint64_t bytes, Part local, Part remote, std::uint32_t rank) noexcept;
  static void set_signal(Operation& operation, Signal signal, std::uint32_t rank) noexcept;
  static void fill_transfer(WorkRequest& work, const Operation& operation, ibv_wr_opcode opcode, std::uint64_t id,
                            unsigned flags) noexcept;
  void fill_add(WorkRequest& work, const Operation& operation, std::uint64_t id) const noexcept;
  void append(PeerQueue& queue, OperationKind kind, const Operation& operation, void** request) noexcept;
  template <OperationKind kKind>
  bool start_usual(Target target, Part local, std::uint64_t bytes, Part remote, Signal signal, void** request) noexcept;
  ErrorKind put_unusual(int context, std::uint64_t source_offset, const Memory* source, std::uint64_t bytes,
                        std::uint64_t target_offset, const Memory* target, std::uint32_t rank, void** request) noexcept;
  ErrorKind start_unusual(const Call& call, void** request) noexcept;
  // Posts the operation, or holds it back until the send queue has room.
  ErrorKind start_held(Target target, PeerQueue& queue, OperationKind kind, const Operation& operation,
                       void** request) noexcept;
  // The next call finds out that it has failed.
  void post_batch() noexcept;
  ErrorKind post_full_batch() noexcept;
  void hold(PeerQueue& queue, Request& request) noexcept;
  void post_held(PeerQueue& queue) noexcept;
  // Fills in the next work request of a request, whose queue has room for it.
  void fill_piece(PeerQueue& queue, Request& request, WorkRequest& work) noexcept;
  bool post_piece(PeerQueue& queue, Request& request) noexcept;
  ErrorKind test_pending(Request& request, int* done) noexcept;
  ErrorKind post_and_end_test(Request& request, int* done) noexcept;
  static ErrorKind end_test(Request& request, int* done) noexcept;
  bool poll(ibv_cq* cq) noexcept;
  static void count_completed(const Request& request) noexcept;
  void complete(std::uint64_t id) noexcept;
  void complete_piece(std::uint64_t id) noexcept;
  ErrorKind check_failure(const Request& request) noexcept;
  ErrorKind check_closed(std::uint32_t rank, std::uint64_t grace_ns) noexcept;
  // Logs why a call is refused: its arguments are wrong.
  ErrorKind log_refusal(Target target, const char* what) const noexcept;
  void fail_post(const PeerQueue& queue, int returned) noexcept;
  void fail_poll() noexcept;
  // The first of `completions` has failed.
  void fail_completion(std::span<const ibv_wc> completions) noexcept;
  // Not of a probe.
  const Request& request_of(std::uint64_t id) const;
  Failure completion_failure(const ibv_wc& cause) const;
  // Of a set with several lanes: context_lanes.cc.
  void look_after_lanes() noexcept;
  void apply_lane_changes();
  void leave_lane(const Failover::Left& failed);
  std::size_t leave_lane(PeerQueue& queue, std::uint32_t psn);
  // False: the queue cannot post now.
  bool find_lane(PeerQueue& queue) const noexcept;
  // Whether the request can be put in the batch.
  bool may_batch(const PeerQueue& queue, OperationKind kind, std::uint64_t bytes) const noexcept;
  void add_to_batch(Target target, PeerQueue& queue, Request& request) noexcept;
  // READs of a pending flush over these ports: a READ ends behind the bytes that have arrived there.
  void begin_reads(Request& request, std::uint32_t ports) noexcept;
  void post_reads() noexcept;
  bool post_read(Request& request, std::uint32_t port) noexcept;
  bool becomes_flush(Request& request) noexcept;
  // Its last work request has been executed.
  void end_operation(Request& request) noexcept;
  void complete_of_lanes(std::uint64_t id, bool works) noexcept;
  static std::optional<std::size_t> executed_entries(const SentWork& sent, std::uint32_t psn);
  bool is_end_of_lane(const ibv_wc& completion) noexcept;
  void set_lane_keys(WorkRequest& work, const PeerQueue& queue, const Operation& operation, bool signal) const;
  std::uint32_t rank_of(const PeerQueue& queue) const;
  void fail_unknown(const PeerQueue& queue) noexcept;
  // With the state of the port now.
  PathFacts facts(const PeerQueue& queue, std::optional<std::uint32_t> of_lane = {}) const;

  const ContextSetParts parts_;
  const std::uint32_t contexts_;
  const std::size_t queues_per_context_;
  const std::uint32_t ranks_;          // of the communicator
  const ibv_sge fetched_;              // where the old values of signals' words go
  UniqueCq cq_;                        // of all QPs of a device, so that any QP can have any place in the order
  std::vector<UniqueCq> further_cqs_;  // of the devices of other lanes
  std::vector<PeerQueue> queues_;      // context by context, in each by peer
  std::vector<PeerQueue*> queue_of_;   // context by context, in each by rank; nullptr: not spoken to
  SendBatch batch_;                    // not posted yet; its queue is never nullptr
  Target batch_target_;                // whose queue that is
  mutable SingleWriter<bool> polled_ = false;
  std::vector<std::uint32_t> peer_of_rank_;  // kNoPeer: not spoken to
  std::vector<PeerPath> paths_;              // by peer index, without oneself
  std::uint64_t max_message_bytes_ = 0;
  std::uint64_t connected_ns_ = 0;
  std::vector<std::shared_ptr<const PortCounters>> counters_;  // of the ports, when the contexts were connected
  // Of a set with several lanes.
  std::vector<UniqueQp> flush_qps_;               // by port, of all contexts
  std::vector<std::uint32_t> flushes_under_way_;  // READs on the flush QPs, by port
  std::uint32_t flush_work_ = 0;                  // entries of the send queue of a flush QP
  Request* unread_ = nullptr;                     // flushes with READs that are not posted
  std::uint32_t psn_ = 0;                         // of the first packet that own QPs expect
  std::unique_ptr<Failover> failover_;            // ends first: it uses the QPs
};

}  // namespace verbatim::rma
