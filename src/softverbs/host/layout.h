// The layout of shared memory. One registry per user assigns process and QP numbers. One segment per process holds
// everything that a peer needs to deliver a message without the help of that process: the responder half of each QP,
// receive rings, completion rings, the table of memory regions, event queues. Both start as zeroed pages, and zero is
// the valid initial state of every field. References inside a segment are table indices or byte offsets from its start,
// because each process maps the segment at another address.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "softverbs/host/counters.h"
#include "softverbs/host/gpu_layout.h"
#include "softverbs/host/settings.h"
#include "softverbs/host/shared_lock.h"

namespace verbatim::softverbs {

// Part of the file names, so that processes with different layouts never share a file.
constexpr std::uint32_t kLayoutVersion = 12;

constexpr std::uint32_t kMaxProcesses = 256;
constexpr std::uint32_t kMaxHostQps = 1U << 16;  // of all processes together; a power of two
constexpr std::uint32_t kMaxContexts = 256;      // the limits below are per process
constexpr std::uint32_t kMaxQps = 1U << 14;
constexpr std::uint32_t kMaxCqs = 1U << 14;
constexpr std::uint32_t kMaxSrqs = 1U << 12;
constexpr std::uint32_t kMaxMrs = 1U << 18;
constexpr std::uint32_t kMaxSge = 32;
constexpr std::uint32_t kGidTableLength = 8;
constexpr std::uint32_t kAsyncQueueLength = 256;  // a power of two
constexpr std::uint32_t kMaxFaultBytes = 1U << 16;
constexpr std::uint32_t kProgramNameBytes = 16;  // with the final 0, as in /proc/PID/comm
constexpr std::uint32_t kNoIndex = ~0U;
constexpr std::uint32_t k24Bits = 0xffffff;  // QP numbers and PSNs

// What passed through the ports of all devices of the host. A process counts what its own QPs have posted, and counts
// it at both ends: at the port that sends and at the port that receives.
struct TrafficCounters {
  Counter xmit_bytes;
  Counter xmit_messages;
  Counter rcv_bytes;
  Counter rcv_messages;
  Counter rcv_sends;  // requests that the port has received, by kind
  Counter rcv_writes;
  Counter rcv_reads;
  Counter rcv_atomics;
};
using HostTraffic = std::array<TrafficCounters, kMaxDevices>;

// ---- the registry ----

struct ProcessSlot {
  std::atomic<Incarnation> incarnation;       // 0: free
  std::atomic<std::int32_t> pid;              // in its PID namespace
  std::atomic<std::uint64_t> pid_namespace;   // inode number
  std::atomic<std::uint32_t> is_threaded;     // SOFTVERBS_ENGINE=thread
  std::atomic<std::uint32_t> faults_applied;  // the last sequence of SharedFaults that this process has applied
};

// At index qpn % kMaxHostQps. Written under the registry's lock. Readers take no lock: they read key, location, key.
struct QpnEntry {
  std::atomic<std::uint64_t> key;       // high half: qpn; low half: the owner's incarnation; 0: free
  std::atomic<std::uint64_t> location;  // high half: process slot; low half: index into Segment::qps
};

// A fault script for running processes. The text is consistent while `sequence` is even. One writer at a time.
struct SharedFaults {
  std::atomic<std::uint32_t> sequence;
  std::atomic<Incarnation> target;  // the process that applies it; 0: all processes
  std::uint32_t bytes;
  char text[kMaxFaultBytes];
};

// A port with a rate (SOFTVERBS_LINK_GBPS). Times are picoseconds of the virtual clock.
struct LinkPort {
  Incarnation owner;
  std::uint32_t backlog;      // QPs with pending requests
  std::uint32_t gbps;         // 0: no process with a rate has used the slot
  std::uint64_t free_ps;      // when the port has sent everything that was granted to it
  std::uint64_t received_ps;  // when the port is free to receive what is sent to it next
};

struct VirtualClock {
  SharedLock lock;  // guards the fields that follow, except the atomic ones
  std::uint64_t now_ps;
  std::uint32_t held;
  std::uint32_t slots_end;              // no slot at or above it ever sent
  Incarnation grant_owner;              // the process that may send now; 0: none
  std::atomic<std::uint32_t> releases;  // number of releases so far
  std::atomic<std::uint32_t>
      wake_counters[kMaxProcesses];  // futexes; incremented when the process may get the next grant
  LinkPort ports[kMaxProcesses][kMaxDevices];
};

struct Registry {
  HostTraffic ended_traffic;              // of the processes that have ended; written under the registry's lock
  std::atomic<std::uint32_t> departures;  // odd while a process's traffic moves to ended_traffic
  std::atomic<Incarnation> last_incarnation;
  std::atomic<std::uint32_t> last_qpn;
  ProcessSlot slots[kMaxProcesses];
  QpnEntry qpns[kMaxHostQps];
  SharedFaults faults;
  VirtualClock clock;
  GpuStaging gpu_staging;
  // Gets memory when the first process registers GPU memory.
  alignas(4096) std::byte staging_bytes[kStagingBuffers][kStagingBytes];
};

// ---- a process's segment ----

struct SharedGid {
  ibv_gid gid;
  std::uint32_t type;  // enum ibv_gid_type
  std::uint32_t valid;
};

// The owner publishes a changed GID table as another copy, so that a concurrent reader still reads a consistent one.
constexpr std::uint32_t kGidTables = 16;

struct SharedPort {
  std::uint32_t ethernet;
  std::uint32_t lid;
  std::uint32_t flid;          // 0: only ports of its subnet reach it
  std::uint32_t grh_required;  // it takes no packet without GRH
  std::uint32_t subnet;
  std::uint32_t excludes_own_atomics;  // and not those of other devices
  std::uint32_t refuses_gpu_atomics;
  std::uint32_t flush_delay_ns;  // from the error state of a QP to its flush completions
  std::uint64_t late_queues[3];  // offsets of a LateQueue for each MemoryPath; 0: none
  std::atomic<std::uint32_t> link_down;
  std::atomic<std::uint32_t> fatal;        // the device had a fatal error
  std::atomic<std::uint32_t> unreachable;  // bit 1 << device: nothing passes between this port and that device
  std::atomic<std::uint32_t> gid_changes;
  SharedGid gid_tables[kGidTables][kGidTableLength];

  const SharedGid* gids() const { return gid_tables[gid_changes.load(std::memory_order_acquire) % kGidTables]; }
};

enum class EventTarget : std::uint32_t { kPort, kCq, kQp, kSrq };

struct AsyncEntry {
  std::uint32_t type;  // ibv_event_type
  EventTarget target;
  std::uint32_t index;   // port number, or the object's index
  std::uint32_t serial;  // of the object: indices are reused
};

// One per ibv_context. The pipe holds one byte for each entry, so that its descriptor is readable while entries wait.
struct SharedContext {
  SharedLock lock;
  std::uint32_t head;
  std::uint32_t tail;
  std::int32_t pipe_fd;  // write end, a descriptor of the owning process
  std::uint32_t device;
  std::uint32_t is_open;
  std::atomic<std::uint32_t> unwritten_events;  // bytes that the owner must write into the pipe for peers
  AsyncEntry entries[kAsyncQueueLength];
};

struct SharedMr {
  std::atomic<std::uint32_t> rkey;  // 0: free. Cleared first; the other fields stay valid until no peer uses the region
  std::atomic<std::uint32_t> lkey;
  std::uint32_t pd;
  std::uint32_t access;
  std::uint64_t iova;
  std::uint64_t length;
  std::uint64_t address;     // in the address space of the owning process; of GPU memory: see gpu_address.h
  std::uint32_t gpu_memory;  // 1 + index of Segment::gpu_memories; 0: host memory, or it cannot be exported
  std::uint32_t uses;        // how often the entry was allocated
};

struct Cqe {
  std::uint64_t wr_id;
  std::uint64_t timestamp_ns;  // set when SharedCq::is_stamped
  std::uint32_t qp_index;      // of the local QP
  std::uint32_t position;      // free-running position of the work request in its queue
  std::uint32_t byte_len;
  std::uint32_t imm;  // of a failed request: the vendor error
  std::uint32_t qpn;
  std::uint32_t source_qpn;
  std::uint8_t status;
  std::uint8_t opcode;
  std::uint8_t wc_flags;
  std::uint8_t reserved;
  std::uint16_t slid;  // the rest: of a received datagram, in the order of ibv_wc, so that it is copied as one word
  std::uint8_t sl;
  std::uint8_t dlid_path_bits;
};

enum class Armed : std::uint32_t { kNo, kAny, kSolicited };

struct SharedCq {
  SharedLock lock;                  // taken by producers
  std::atomic<std::uint32_t> tail;  // next to write; stored after the entry and after the data that the entry announces
  std::atomic<std::uint32_t> head;  // next to read; stored by the owner only
  std::uint32_t mask;               // entries - 1, a power of two
  std::uint32_t serial;
  std::uint64_t ring;  // offset of Cqe[mask + 1]
  std::uint32_t context;
  std::atomic<std::uint32_t> alive;
  std::uint32_t is_stamped;
  std::int32_t channel_fd;  // write end of the completion channel's pipe; -1: no channel
  std::atomic<Armed> armed;
  std::atomic<std::uint32_t> unread_events;
  std::atomic<std::uint32_t> unwritten_events;  // bytes that the owner must write into the channel's pipe for peers
  std::atomic<std::uint32_t> overrun;
  CqCounters counters;
};

struct SharedSge {
  std::uint64_t address;
  std::uint32_t length;
  std::uint32_t lkey;
};

// Value of ReceiveEntry::fault: the receive is filled as usual and never completes.
constexpr std::uint16_t kWithoutCompletion = 0xffff;

struct ReceiveEntry {
  std::uint64_t wr_id;
  std::uint16_t sge_count;
  std::uint16_t fault;  // the ibv_wc_status with which the receive fails, or kWithoutCompletion; 0: no fault
  std::uint32_t position;
};

// Entries of sizeof(ReceiveEntry) + max_sge * sizeof(SharedSge). The owner posts; the delivering process consumes.
struct ReceiveRing {
  std::atomic<std::uint32_t> posted;
  std::atomic<std::uint32_t> consumed;
  std::uint32_t mask;
  std::uint32_t max_sge;
  std::uint64_t ring;
};

struct SharedSrq {
  SharedLock lock;  // taken by consumers
  ReceiveRing ring;
  std::uint32_t pd;
  std::uint32_t context;
  std::uint32_t serial;
  std::uint32_t limit;  // SRQ_LIMIT_REACHED is raised once when fewer receives wait; 0: not armed
  std::atomic<std::uint32_t> alive;
  ReceiveCounters counters;
};

// Value of OpenReceive::filled: the message is in memory, and only the completion is missing.
constexpr std::uint32_t kWholeMessage = 2;

// A consumed receive that is not complete yet, because a SEND arrives in several steps.
struct OpenReceive {
  std::uint32_t active;
  std::uint32_t filled;  // at least one step was executed: a first packet is out of sequence now; or kWholeMessage
  ReceiveEntry entry;
  SharedSge sges[kMaxSge];
};

// The responder half of a QP. `lock` guards all fields that are not atomic.
struct SharedQp {
  SharedLock lock;
  std::atomic<std::uint32_t> qpn;  // 0: free
  std::atomic<std::uint32_t> state;
  std::uint32_t context;
  std::uint32_t device;
  std::atomic<std::uint32_t> peer_port;  // 1 + the peer's device; 0: no route to the peer was found yet
  std::uint32_t path;                    // 1 + the path of the fabric that its packets take; 0: it has no address
  std::uint32_t udp_source_port;         // of its packets; 0: none
  std::uint32_t pd;
  std::uint32_t send_cq;
  std::uint32_t recv_cq;
  std::uint32_t srq;  // kNoIndex: none
  std::uint32_t dest_qpn;
  std::uint32_t expected_psn;
  std::uint32_t path_mtu_bytes;
  std::uint32_t access;
  std::uint32_t min_rnr_timer;
  std::uint32_t max_dest_rd_atomic;
  std::uint32_t established;   // a packet was executed since RESET
  std::uint64_t flush_due_ns;  // in the error state: its requests and receives are flushed at this time; 0: at once
  std::uint32_t is_last_receive_due;  // IBV_EVENT_QP_LAST_WQE_REACHED is still to be raised
  std::uint32_t resets;               // how often the QP was reset
  std::uint32_t type;                 // ibv_qp_type; the same as long as the QP has its number
  std::atomic<std::uint32_t> qkey;
  // The last packets that arrived and were not executed: the port or the QP had failed. For SOFTVERBS_RQ_PSN=accepted.
  std::uint32_t unexecuted_psn;
  std::uint32_t unexecuted_packets;  // 0: none since RESET
  std::uint32_t atomic_psn;          // the last atomic and its result: the requester may repeat it
  std::uint64_t atomic_result;
  ReceiveRing receives;
  OpenReceive open;
  CopyProgress sends;     // from or to memory of this process, for requests of this QP
  CopyProgress arrivals;  // to memory of this process, for requests of the peer
  QpCounters counters;
};

// What a device has written to one kind of memory and what is not visible there yet; see engine/late_writes.h. The
// writes from `first` to before `count` are not visible. `lock` guards all fields that are not atomic.
struct LateWrite {
  std::uint64_t address;  // as in SharedMr
  std::uint64_t due_ns;   // when it is to be visible
  std::uint32_t bytes;
  std::uint32_t offset;  // in LateQueue::bytes
};

constexpr std::uint32_t kLateWrites = 256;
constexpr std::uint32_t kLateBytes = 2U << 20;

struct LateQueue {
  SharedLock lock;
  std::uint64_t delay_ns;  // from a write until it is visible
  std::uint32_t first;
  std::uint32_t count;
  std::atomic<std::uint32_t> asked;     // how often peers have asked the owner to make all writes visible
  std::atomic<std::uint32_t> answered;  // how many of these requests it has executed; futex
  LateWrite writes[kLateWrites];
  std::byte bytes[kLateBytes];
};

// Slots in which peers that may not access the owner's memory ask a thread of the owner to copy; see copier.h.
enum class CopyState : std::uint32_t { kFree, kFull, kBusy, kDone };

struct SharedSpan {
  std::uint64_t address;
  std::uint64_t bytes;
};

struct CopySlot {
  SharedLock lock;  // taken by senders
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
  std::atomic<std::uint32_t> wake_counter;  // futex of the copier thread
  std::uint64_t buffers;                    // offset of the buffers, one for each slot
  CopySlot slots[kCopySlots];
};

struct Segment {
  Incarnation incarnation;
  std::int32_t pid;
  char program[kProgramNameBytes];    // the name that the program had when it opened its first device
  std::atomic<std::uint32_t> closed;  // the process has left the registry

  std::atomic<std::uint32_t> doorbell;  // futex of all engine threads
  std::atomic<std::uint32_t> sleeping;  // number of sleeping engine threads
  std::atomic<std::uint32_t> polling;   // number of engine threads without work that will see new work at once
  std::atomic<std::uint32_t> service_pending;
  std::atomic<std::uint64_t> failed_qps[kMaxQps / 64];  // bitmap of QPs that a peer moved to the error state
  // Bitmaps of CQs and contexts with unwritten events: peers of other PID namespaces cannot reach the descriptors.
  std::atomic<std::uint32_t> has_unwritten_events;
  std::atomic<std::uint64_t> unwritten_cqs[kMaxCqs / 64];
  std::atomic<std::uint64_t> unwritten_contexts[kMaxContexts / 64];

  std::atomic<std::uint32_t> impaired;    // a port below is down, fatal or partly unreachable, or the process is frozen
  std::atomic<std::uint32_t> frozen;      // the devices neither send nor respond
  std::uint32_t has_late_writes;          // a port below has a LateQueue
  std::atomic<std::uint32_t> late_asked;  // futex of the thread for them; incremented after LateQueue::asked

  std::uint32_t is_threaded;    // SOFTVERBS_ENGINE=thread
  std::uint64_t probe_address;  // readable memory; peers read it to find out whether they may access this process
  SharedCopier copier;
  SharedGpuCopier gpu_copier;
  SharedGpuMemory gpu_memories[kMaxGpuMemories];

  AtomicsLocks atomics_locks;  // serialize RDMA atomics on host memory

  ProcessCounters counters;
  HostTraffic destroyed_traffic;              // of the QPs that this process has destroyed
  std::atomic<std::uint32_t> engine_threads;  // number of used entries of `engines`
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
constexpr std::size_t kArenaBytes = std::size_t{1} << 31;  // address space; rings get memory when they are created
constexpr std::size_t kSegmentBytes = kArenaOffset + kArenaBytes;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

template <typename T>
T* at_offset(Segment& segment, std::uint64_t offset) {
  return reinterpret_cast<T*>(reinterpret_cast<std::byte*>(&segment) + offset);
}

}  // namespace verbatim::softverbs
