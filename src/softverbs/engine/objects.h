// The private part of the objects behind a program's handles. The verb that creates an object allocates it, and the
// verb that destroys it frees it; `shared` points to its part in the segment.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "base/unique_fd.h"
#include "softverbs/engine/futex_mutex.h"
#include "softverbs/host/layout.h"
#include "softverbs/host/process_view.h"
#include "softverbs/host/shm_file.h"

namespace verbatim::softverbs {

class Process;

// A pipe that is readable while events are pending. The program polls the read end.
struct EventPipe {
  UniqueFd read_end;
  UniqueFd write_end;
};

// An object that is returned as Base by a verb and as the longer Extended by the extended verb.
template <typename Base, typename Extended>
struct Extensible : Base {
  alignas(Extended) std::byte rest[sizeof(Extended) - sizeof(Base)] = {};

  Extended& extended() { return *reinterpret_cast<Extended*>(static_cast<Base*>(this)); }
};
static_assert(sizeof(ibv_cq) == offsetof(ibv_cq_ex, comp_mask) && sizeof(ibv_qp) == offsetof(ibv_qp_ex, comp_mask));

struct Context : verbs_context {
  Process* process = nullptr;
  std::uint32_t device = 0;
  std::uint32_t index = 0;
  SharedContext* shared = nullptr;
  EventPipe pipe;
  Mutex objects_mutex;  // guards the lists below, which only rare calls use
  std::vector<struct Cq*> cqs VERBATIM_GUARDED_BY(objects_mutex);
  std::vector<struct Qp*> qps VERBATIM_GUARDED_BY(objects_mutex);
  std::vector<struct Srq*> srqs VERBATIM_GUARDED_BY(objects_mutex);
};

struct Pd : ibv_pd {
  std::atomic<std::uint32_t> users{0};
};

struct Mr : ibv_mr {
  std::uint32_t index = 0;
  Mapping dmabuf;  // of a region registered by descriptor
};

struct Channel : ibv_comp_channel {
  EventPipe pipe;
};

struct Cq : Extensible<ibv_cq, ibv_cq_ex> {
  Process* process = nullptr;
  std::uint32_t index = 0;
  SharedCq* shared = nullptr;
  Cqe* ring = nullptr;
  std::atomic<std::uint32_t> users{0};
  std::atomic<std::uint32_t> empty_polls{0};
  FutexMutex poll_mutex;
  // For extended queues
  bool is_single_threaded = false;
  ibv_wc current{};
  std::uint64_t current_timestamp_ns = 0;
  std::uint32_t comp_events_delivered = 0;   // under ibv_cq::mutex
  std::uint32_t async_events_delivered = 0;  // under ibv_cq::mutex
};

// The owner's half of a receive ring.
struct ReceivePoster {
  ReceiveRing* ring = nullptr;
  std::byte* entries = nullptr;
  std::uint32_t max_wr = 0;
  std::uint32_t max_sge = 0;
  std::size_t bytes = 0;
  std::atomic<std::uint32_t> released{0};  // entries whose completion the program has read
  FutexMutex mutex;
};

struct Srq : ibv_srq {
  Process* process = nullptr;
  std::uint32_t index = 0;
  SharedSrq* shared = nullptr;
  ReceivePoster poster;
  std::atomic<std::uint32_t> users{0};
  std::uint32_t events_delivered = 0;  // under ibv_srq::mutex
};

inline Context& context_of(ibv_context* context) {
  return *static_cast<Context*>(verbs_get_ctx(context));
}

}  // namespace verbatim::softverbs
