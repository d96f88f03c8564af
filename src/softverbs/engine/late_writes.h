// SOFTVERBS_LATE_HOST_MS, SOFTVERBS_LATE_GPU_MS: what a device writes to memory becomes visible some time after the
// message was acknowledged. A NIC's writes are posted on PCI Express: it does not wait until they have arrived. What is
// held back is kept apart by device and by path (MemoryPath), because nothing orders the writes of two devices, or
// those on two paths. It becomes visible in the order of its arrival by:
// - A READ or an atomic that the device executes on this path: a read does not pass the writes before it.
// - For host memory every receive of the device that succeeds, and every atomic. The entry in the completion queue is a
//   write behind the bytes, to the same memory, and the standard promises as much. For GPU memory a receive does not do
//   that: therefore programs READ the memory afterwards, as NCCL's flush does.
// - Deregistration, because the program may give the memory back then.
// - The time, and a queue that is full.
// Completions with an error make nothing visible, because software may have made them. Neither does a QP that fails or
// is reset. An atomic changes its word at once. What the answer to a READ or an atomic writes at the requester is
// visible at once too, and what its device holds back there becomes visible before it.
//
// The bytes lie in the segment of the process that owns the memory: a READ of the owner to itself shows what peers have
// written, also when those have died, and a thread of the owner sees to the time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/result.h"
#include "softverbs/gpu/gpu_address.h"
#include "softverbs/host/layout.h"
#include "softverbs/host/process_view.h"
#include "softverbs/memory/copy.h"

namespace verbatim::softverbs {

class Process;

// Called once, before the process has QPs: makes the queues that its settings demand. Without these settings it does
// nothing, and so does start_late_writes().
Status prepare_late_writes(Process& process);
// Starts the thread that makes writes visible when their time has come. EAGAIN: it cannot be started.
Status start_late_writes(Process& process);

// What a device of that process holds back of its writes on a path; nullptr: they are visible at once.
inline LateQueue* late_queue(Segment& segment, std::uint32_t device, MemoryPath path) {
  const std::uint64_t offset = segment.ports[device].late_queues[static_cast<std::size_t>(path)];
  return offset == 0 ? nullptr : at_offset<LateQueue>(segment, offset);
}

// As copy_to(): `from` is memory of this process, `to` memory of `target`, which `device` of `target` writes. Writes on
// paths without a queue are visible at once. The caller holds the lock of a QP of that device. kSourceFault:
// `from` cannot be read. kProcessDead: also where memory runs out.
CopyResult write_late(const ProcessView& target, Incarnation me, std::uint32_t device, Spans& from, Spans& to);

// Makes visible what the device has written on that path, except what cannot be written any more. Where only threads of
// the owner reach this memory, it waits for one of them. kProcessDead: not yet; call again.
CopyResult show_late_writes(const ProcessView& target, Incarnation me, std::uint32_t device, MemoryPath path);

}  // namespace verbatim::softverbs
