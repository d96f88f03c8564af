// Counters of verbs, work requests and objects. They lie in shared memory, so that the control program reads them
// without the help of the counted process. Each data path counter is written under a lock that its caller holds anyway,
// so an increment is a load and a store. Only rare calls, which hold no common lock, use an atomic increment.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace verbatim::softverbs {

class Counter {
 public:
  // The caller holds the lock that serializes the writers.
  void add(std::uint64_t amount) {
    value_.store(value_.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }
  void add_shared(std::uint64_t amount) { value_.fetch_add(amount, std::memory_order_relaxed); }
  void reset() { value_.store(0, std::memory_order_relaxed); }
  std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_;
};

// Verbs that are counted per process. The data path's verbs are counted per QP, CQ and SRQ instead.
#define SOFTVERBS_COUNTED_VERBS(X)               \
  X(kOpenDevice, open_device)                    \
  X(kCloseDevice, close_device)                  \
  X(kQueryDevice, query_device)                  \
  X(kQueryDeviceEx, query_device_ex)             \
  X(kQueryRtValuesEx, query_rt_values_ex)        \
  X(kQueryPort, query_port)                      \
  X(kQueryGid, query_gid)                        \
  X(kQueryGidEx, query_gid_ex)                   \
  X(kQueryGidTable, query_gid_table)             \
  X(kQueryPkey, query_pkey)                      \
  X(kGetPkeyIndex, get_pkey_index)               \
  X(kAllocPd, alloc_pd)                          \
  X(kDeallocPd, dealloc_pd)                      \
  X(kRegMr, reg_mr)                              \
  X(kRegMrIova, reg_mr_iova)                     \
  X(kRegMrIova2, reg_mr_iova2)                   \
  X(kRegDmabufMr, reg_dmabuf_mr)                 \
  X(kMlx5dvRegDmabufMr, mlx5dv_reg_dmabuf_mr)    \
  X(kReregMr, rereg_mr)                          \
  X(kDeregMr, dereg_mr)                          \
  X(kCreateCompChannel, create_comp_channel)     \
  X(kDestroyCompChannel, destroy_comp_channel)   \
  X(kGetCqEvent, get_cq_event)                   \
  X(kAckCqEvents, ack_cq_events)                 \
  X(kCreateCq, create_cq)                        \
  X(kCreateCqEx, create_cq_ex)                   \
  X(kResizeCq, resize_cq)                        \
  X(kDestroyCq, destroy_cq)                      \
  X(kReqNotifyCq, req_notify_cq)                 \
  X(kCreateSrq, create_srq)                      \
  X(kCreateSrqEx, create_srq_ex)                 \
  X(kModifySrq, modify_srq)                      \
  X(kQuerySrq, query_srq)                        \
  X(kDestroySrq, destroy_srq)                    \
  X(kCreateQp, create_qp)                        \
  X(kCreateQpEx, create_qp_ex)                   \
  X(kModifyQp, modify_qp)                        \
  X(kQueryQp, query_qp)                          \
  X(kDestroyQp, destroy_qp)                      \
  X(kQueryQpDataInOrder, query_qp_data_in_order) \
  X(kQueryEce, query_ece)                        \
  X(kSetEce, set_ece)                            \
  X(kCreateAh, create_ah)                        \
  X(kDestroyAh, destroy_ah)                      \
  X(kAttachMcast, attach_mcast)                  \
  X(kGetAsyncEvent, get_async_event)             \
  X(kAckAsyncEvent, ack_async_event)

enum class Verb : std::uint32_t {
#define SOFTVERBS_VERB(constant, name) constant,
  SOFTVERBS_COUNTED_VERBS(SOFTVERBS_VERB)
#undef SOFTVERBS_VERB
};

// Indexed by Verb. The names in the header.
constexpr std::array kVerbNames{
#define SOFTVERBS_VERB(constant, name) "ibv_" #name,
    SOFTVERBS_COUNTED_VERBS(SOFTVERBS_VERB)
#undef SOFTVERBS_VERB
};

constexpr std::array kSendOpcodeNames{"rdma_write",         "rdma_write_with_imm", "send", "send_with_imm", "rdma_read",
                                      "atomic_cmp_and_swp", "atomic_fetch_and_add"};
static_assert(kSendOpcodeNames.size() == IBV_WR_ATOMIC_FETCH_AND_ADD + 1);

enum class ObjectKind : std::uint32_t { kContext, kPd, kMr, kChannel, kCq, kSrq, kQp, kAh };
constexpr std::array kObjectNames{"context", "pd", "mr", "comp_channel", "cq", "srq", "qp", "ah"};

struct ObjectCounters {
  Counter created;
  Counter alive;
  std::atomic<std::uint32_t> table_end;  // for objects with a table: no entry at or above it was ever used

  void count_created() {
    created.add_shared(1);
    alive.add_shared(1);
  }
  void count_destroyed() { alive.add_shared(~std::uint64_t{0}); }
};

// Counters with different writers are on different cache lines.
constexpr std::size_t kCacheLineBytes = 64;

// Written under SendQueue::mutex.
struct alignas(kCacheLineBytes) SendCounters {
  Counter posts;      // calls of ibv_post_send
  Counter completes;  // calls of ibv_wr_complete
  Counter bytes;
  Counter inline_bytes;
  std::array<Counter, kSendOpcodeNames.size()> requests;
};

// Written under ReceivePoster::mutex.
struct alignas(kCacheLineBytes) ReceiveCounters {
  Counter posts;  // calls of ibv_post_recv or ibv_post_srq_recv
  Counter requests;
};

struct QpCounters {
  SendCounters sends;
  ReceiveCounters receives;
  alignas(kCacheLineBytes) Counter send_completions;  // this and the next: written under the lock of their CQ
  alignas(kCacheLineBytes) Counter receive_completions;
  Counter modifies;  // this and the next: written under Qp::modify_mutex
  Counter queries;
};

struct CqCounters {
  alignas(kCacheLineBytes) Counter polls;  // polls that returned completions
  Counter empty_polls;                     // may lose increments when several threads poll one CQ at the same time
  Counter completions;                     // returned by polls
};

// Of one thread of the `thread` engine, the only writer.
struct alignas(kCacheLineBytes) EngineCounters {
  Counter requests;  // executed send requests
};

// Counters of the rare calls, and the sums of destroyed objects.
struct ProcessCounters {
  std::array<Counter, kVerbNames.size()> calls;
  std::array<ObjectCounters, kObjectNames.size()> objects;
  QpCounters destroyed_qps;
  CqCounters destroyed_cqs;
  ReceiveCounters destroyed_srqs;

  ObjectCounters& of(ObjectKind kind) { return objects[static_cast<std::size_t>(kind)]; }
  const ObjectCounters& of(ObjectKind kind) const { return objects[static_cast<std::size_t>(kind)]; }
};

// reset() and add_shared() work on structs that consist of counters only.
template <typename Counters>
void reset(Counters& counters) {
  auto* const all = reinterpret_cast<Counter*>(&counters);
  for (std::size_t i = 0; i < sizeof counters / sizeof(Counter); ++i) all[i].reset();
}
template <typename Counters>
void add_shared(Counters& sum, const Counters& counters) {
  auto* const to = reinterpret_cast<Counter*>(&sum);
  const auto* const from = reinterpret_cast<const Counter*>(&counters);
  for (std::size_t i = 0; i < sizeof counters / sizeof(Counter); ++i) {
    if (const std::uint64_t amount = from[i].get(); amount != 0) to[i].add_shared(amount);
  }
}

}  // namespace verbatim::softverbs
