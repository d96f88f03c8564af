// What lies in shared memory, byte for byte: one registry per user, which gives out process and QP numbers, and one
// segment per process, which holds everything that a peer needs in order to deliver a message without this process's
// help: the responder half of each QP, receive rings, completion rings, the table of memory regions, event queues.
// Both start as zeroed pages, and zero is the valid initial state of every field. References inside a segment are
// table indices or byte offsets from its start, as each process maps it elsewhere.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "softverbs/host/counters.h"
#include "softverbs/host/settings.h"
#include "softverbs/host/shared_lock.h"

namespace verbatim::softverbs {

// Part of the file names: different layouts never meet.
constexpr std::uint32_t kLayoutVersion = 4;

constexpr std::uint32_t kMaxProcesses = 256;
constexpr std::uint32_t kMaxHostQps = 1U << 16;  // all processes together; a power of two
constexpr std::uint32_t kMaxContexts = 256;      // the limits below are per process
constexpr std::uint32_t kMaxQps = 1U << 14;
constexpr std::uint32_t kMaxCqs = 1U << 14;
constexpr std::uint32_t kMaxSrqs = 1U << 12;
constexpr std::uint32_t kMaxMrs = 1U << 18;
constexpr std::uint32_t kMaxSge = 32;
constexpr std::uint32_t kGidTableLength = 8;
constexpr std::uint32_t kAsyncQueueLength = 256;  // a power of two
constexpr std::uint32_t kMaxFaultBytes = 1U << 16;
constexpr std::uint32_t kNoIndex = ~0U;      // no such index
constexpr std::uint32_t k24Bits = 0xffffff;  // QP numbers and PSNs

// ---- the registry ----

struct ProcessSlot {
  std::atomic<Incarnation> incarnation;  // 0: free
  std::atomic<std::int32_t> pid;
  std::atomic<std::uint32_t> faults_applied;  // the last of Registry::faults that this process has put to work
};

// At qpn % kMaxHostQps. Written under the registry's lock, read without: key, place, key again.
struct QpnEntry {
  std::atomic<std::uint64_t> key;       // qpn in the high half, the owner's incarnation in the low one; 0: free
  std::atomic<std::uint64_t> location;  // process slot in the high half, index into Segment::qps in the low one
};

// A fault script for processes that run: its text, whole while `sequence` is even. One writer at a time.
struct SharedFaults {
  std::atomic<std::uint32_t> sequence;
  std::atomic<std::int32_t> pid;  // for this process only; 0: for all
  std::uint32_t bytes;
  char text[kMaxFaultBytes];
};

// Of SOFTVERBS_LINK_GBPS. Times in picoseconds of the virtual clock.
struct LinkPort {
  Incarnation owner;
  std::uint32_t backlog;      // QPs with something to send
  std::uint64_t free_ps;      // when it has sent what it was given
  std::uint64_t received_ps;  // when it has taken in what was sent to it
};

struct VirtualClock {
  SharedLock lock;  // of all that follows, except what is atomic
  std::uint64_t now_ps;
  std::uint32_t held;
  std::uint32_t slots_end;                                  // no slot from here on ever sent
  Incarnation grant_owner;                                  // 0: nobody sends at the moment
  std::atomic<std::uint32_t> releases;                      // releases so far
  std::atomic<std::uint32_t> wake_counters[kMaxProcesses];  // futexes: somebody else's turn is over
  LinkPort ports[kMaxProcesses][kMaxDevices];
};

struct Registry {
  std::atomic<Incarnation> last_incarnation;
  std::atomic<std::uint32_t> last_qpn;
  ProcessSlot slots[kMaxProcesses];
  QpnEntry qpns[kMaxHostQps];
  SharedFaults faults;
  VirtualClock clock;
};

// ---- a process's segment ----

struct SharedGid {
  ibv_gid gid;
  std::uint32_t type;  // enum ibv_gid_type
  std::uint32_t valid;
};

// The owner changes its GID table by publishing another one: who reads a table is not disturbed.
constexpr std::uint32_t kGidTables = 16;

struct SharedPort {
  std::uint32_t ethernet;
  std::uint32_t lid;
  std::atomic<std::uint32_t> link_down;
  std::atomic<std::uint32_t> fatal;        // the device had a fatal error
  std::atomic<std::uint32_t> unreachable;  // 1 << device: nothing passes between the two
  std::atomic<std::uint32_t> gid_changes;
  SharedGid gid_tables[kGidTables][kGidTableLength];

  const SharedGid* gids() const { return gid_tables[gid_changes.load(std::memory_order_acquire) % kGidTables]; }
};

enum class EventTarget : std::uint32_t { kPort, kCq, kQp, kSrq };

struct AsyncEntry {
  std::uint32_t type;  // ibv_event_type
  EventTarget target;
  std::uint32_t index;   // port number, or the object's index
  std::uint32_t serial;  // of the object: an index is used again
};

// One per ibv_context. One byte in the pipe for each entry, so that the descriptor is readable while entries wait.
struct SharedContext {
  SharedLock lock;
  std::uint32_t head;
  std::uint32_t tail;
  std::int32_t pipe_fd;  // write end, a descriptor of the owning process
  std::uint32_t device;
  std::uint32_t is_open;
  AsyncEntry entries[kAsyncQueueLength];
};

struct SharedMr {
  std::atomic<std::uint32_t> rkey;  // 0: free. Cleared first; the rest stays readable until no peer is in the middle
  std::atomic<std::uint32_t> lkey;
  std::uint32_t pd;
  std::uint32_t access;
  std::uint64_t iova;
  std::uint64_t length;
  std::uint64_t address;  // in the owning process
  std::uint32_t uses;     // how often the entry was given out
};

struct Cqe {
  std::uint64_t wr_id;
  std::uint64_t timestamp_ns;  // when the queue is stamped
  std::uint32_t qp_index;      // of the local QP, kNoIndex once that is gone
  std::uint32_t position;      // the free-running number of the work request in its queue
  std::uint32_t byte_len;
  std::uint32_t imm;  // with an error: the vendor's number for it
  std::uint32_t qpn;
  std::uint32_t source_qpn;
  std::uint8_t status;
  std::uint8_t opcode;
  std::uint8_t wc_flags;
  std::uint8_t reserved;
};

enum class Armed : std::uint32_t { kNo, kAny, kSolicited };

struct SharedCq {
  SharedLock lock;                  // producers
  std::atomic<std::uint32_t> tail;  // next to write; stored after the entry and after the data that it announces
  std::atomic<std::uint32_t> head;  // next to read; stored by the owner only
  std::uint32_t mask;               // entries - 1, a power of two
  std::uint32_t serial;
  std::uint64_t ring;  // offset of Cqe[mask + 1]
  std::uint32_t context;
  std::atomic<std::uint32_t> alive;
  std::uint32_t is_stamped;
  std::int32_t channel_fd;  // write end of the completion channel's pipe, -1 without one
  std::atomic<Armed> armed;
  std::atomic<std::uint32_t> unread_events;
  std::atomic<std::uint32_t> overrun;
  CqCounters counters;
};

struct SharedSge {
  std::uint64_t address;
  std::uint32_t length;
  std::uint32_t lkey;
};

// Of ReceiveEntry::fault: it is filled as usual, and its completion never comes.
constexpr std::uint16_t kWithoutCompletion = 0xffff;

struct ReceiveEntry {
  std::uint64_t wr_id;
  std::uint16_t sge_count;
  std::uint16_t fault;  // the ibv_wc_status with which it shall fail, or kWithoutCompletion; 0: none
  std::uint32_t position;
};

// Entries of sizeof(ReceiveEntry) + max_sge * sizeof(SharedSge). The owner posts, whoever delivers takes.
struct ReceiveRing {
  std::atomic<std::uint32_t> posted;
  std::atomic<std::uint32_t> consumed;
  std::uint32_t mask;
  std::uint32_t max_sge;
  std::uint64_t ring;
};

struct SharedSrq {
  SharedLock lock;  // takers
  ReceiveRing ring;
  std::uint32_t pd;
  std::uint32_t context;
  std::uint32_t serial;
  std::uint32_t limit;  // the event is raised once when fewer wait; 0: not armed
  std::atomic<std::uint32_t> alive;
  ReceiveCounters counters;
};

// A receive that was taken and is not complete: a SEND arrives in several steps.
struct OpenReceive {
  std::uint32_t active;
  std::uint32_t filled;  // a step was executed: no first packet fits any more
  ReceiveEntry entry;
  SharedSge sges[kMaxSge];
};

// The half of a QP that answers requests. All of it under `lock`, except where a field is atomic.
struct SharedQp {
  SharedLock lock;
  std::atomic<std::uint32_t> qpn;  // 0: free
  std::atomic<std::uint32_t> state;
  std::uint32_t context;
  std::uint32_t device;
  std::uint32_t pd;
  std::uint32_t send_cq;
  std::uint32_t recv_cq;
  std::uint32_t srq;  // kNoIndex without
  std::uint32_t dest_qpn;
  std::uint32_t expected_psn;
  std::uint32_t path_mtu_bytes;
  std::uint32_t access;
  std::uint32_t min_rnr_timer;
  std::uint32_t max_dest_rd_atomic;
  std::uint32_t established;  // something was executed since RESET
  std::uint32_t atomic_psn;   // of the last atomic, and what it found: it may be asked again
  std::uint64_t atomic_result;
  ReceiveRing receives;
  OpenReceive open;
  QpCounters counters;
};

// Where a thread of the owner copies for peers that may not do it themselves; see copier.h.
enum class CopyState : std::uint32_t { kFree, kFull, kBusy, kDone };

struct SharedSpan {
  std::uint64_t address;
  std::uint64_t bytes;
};

struct CopySlot {
  SharedLock lock;  // senders
  std::atomic<CopyState> state;
  std::uint32_t is_from_target;
  std::uint32_t failed;
  std::uint32_t count;
  std::uint64_t bytes;
  SharedSpan spans[kMaxSge];
};

constexpr std::uint32_t kCopySlots = 4;

struct SharedCopier {
  std::atomic<std::uint32_t> wanted;
  std::atomic<std::uint32_t> ready;
  std::atomic<std::uint32_t> wake_counter;  // futex of its thread
  std::uint64_t buffers;                    // offset; one for each slot
  CopySlot slots[kCopySlots];
};

struct Segment {
  Incarnation incarnation;
  std::int32_t pid;
  std::atomic<std::uint32_t> closed;  // the process left in good order

  std::atomic<std::uint32_t> doorbell;  // futex of the engine threads, shared
  std::atomic<std::uint32_t> sleeping;  // so many of them
  std::atomic<std::uint32_t> service_pending;
  std::atomic<std::uint64_t> failed_qps[kMaxQps / 64];  // QPs that a peer moved to the error state

  std::atomic<std::uint32_t> impaired;  // some port below is not as it should be, or
  std::atomic<std::uint32_t> frozen;    // nothing is sent or answered here

  std::uint32_t is_threaded;    // with the `thread` engine
  std::uint64_t probe_address;  // of something that peers may try to read
  SharedCopier copier;

  SharedLock atomics_lock;  // one RDMA atomic at a time: IBV_ATOMIC_HCA

  ProcessCounters counters;
  std::atomic<std::uint32_t> engine_threads;  // so many below
  EngineCounters engines[kMaxEngines];

  SharedPort ports[kMaxDevices];
  SharedContext contexts[kMaxContexts];
  SharedQp qps[kMaxQps];
  SharedCq cqs[kMaxCqs];
  SharedSrq srqs[kMaxSrqs];
  SharedMr mrs[kMaxMrs];
};

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

constexpr std::size_t kArenaOffset = round_up(sizeof(Segment), kPageBytes);
constexpr std::size_t kArenaBytes = std::size_t{1} << 31;  // address space; memory is taken as rings are made
constexpr std::size_t kSegmentBytes = kArenaOffset + kArenaBytes;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

template <typename T>
T* at_offset(Segment& segment, std::uint64_t offset) {
  return reinterpret_cast<T*>(reinterpret_cast<std::byte*>(&segment) + offset);
}

}  // namespace verbatim::softverbs
