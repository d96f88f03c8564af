// Makes RDMA writes that have arrived in GPU memory visible to the GPU: an RDMA READ of the buffer over a QP connected
// to itself completes only after the writes before it. Owned by a receive comm. The first flush creates the QPs: NCCL
// does not flush on GPUs that need no flush.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/config.h"
#include "base/result.h"
#include "net/transfer/endpoint.h"
#include "net/transfer/memory.h"
#include "net/transfer/request.h"
#include "net/transfer/single_writer.h"

namespace verbatim {

class FlushQueue {
 public:
  // As many as receives can be outstanding, because NCCL flushes after a receive.
  static constexpr std::uint32_t kSlots = wire::kMaxInFlight;

  // Creates the QPs; completions go to `endpoint`'s queues. `target`, in `control`, is what the READs write; its
  // content is not used. An error is of the device `port`.
  Status prepare(Comm& comm, const Endpoint& endpoint, const Config& config, const ControlMemory& control,
                 const std::byte* target, std::size_t& port);

  bool prepared() const { return active_.load(std::memory_order_acquire) != nullptr; }

  // Any thread.
  bool uses(const ibv_qp& qp) const;

  // Posts a READ of the byte at `data` on every port, because each may have carried a part of the data. With `hold`,
  // and while all ports are left out, the flush is not done before complete_held(). nullptr when no slot is free, or
  // when posting on `port` failed: then `returned` is not 0.
  Request* post(const void* data, const MemoryKeys& memory, bool hold, int& returned, std::size_t& port);

  // The READ with this `wr_id` has completed.
  void complete(std::uint64_t wr_id);

  // No READ is posted on this port any more: its link is down. Outstanding ones complete with an error at once.
  // `device`: of the port.
  void leave_out(std::size_t port, const Device& device);
  // This READ of a port that is left out has failed. What its device wrote before cannot be flushed: the READ counts as
  // complete at complete_held(), when all of it has had the time to come.
  void hold(std::uint64_t wr_id);
  void complete_held();
  // Whether this flush waits for that.
  static bool is_held(const Request& request) { return static_cast<const Slot&>(request).held != 0; }
  // A QP in RTS that is connected to itself, from this PSN on, for READs on the port.
  static Result<UniqueQp> make_flush_qp(const Port& port, ibv_cq* cq, std::uint32_t psn, const Config& config);
  bool is_left_out(std::size_t port) const { return (left_out_ >> port & 1) != 0; }
  // READs are posted on this port again, on the QP `qp`, which becomes the one from before. False: nothing has changed,
  // because flushes have been prepared since and `qp` is missing.
  bool restore(std::size_t port, UniqueQp& qp);

  // Whether no READ is outstanding.
  bool all_done() const;

  // Outstanding flushes. Any thread.
  std::uint32_t pending() const { return pending_; }

  // Flushes that have not been freed. Any thread.
  std::uint32_t in_use() const { return in_use_.acquire(); }

  // Frees a flush that is done.
  void retire(Request& request);

 private:
  struct Slot : Request {
    std::uint32_t reads_left = 0;
    std::uint32_t held = 0;
  };

  struct State {
    std::uint64_t target = 0;
    std::vector<std::uint32_t> target_lkeys;  // by device
    std::vector<UniqueQp> qps;                // by port; nullptr if it was left out before
    std::vector<Slot> slots;
    std::vector<std::uint32_t> free_slots;
  };

  SingleWriter<std::uint32_t> pending_;
  SingleWriter<std::uint32_t> in_use_;
  SingleWriter<std::uint32_t> left_out_;  // ports, one bit each
  std::unique_ptr<State> state_;
  std::atomic<State*> active_{nullptr};
};

// In the wr_id of a flush READ: distinguishes it from the comm's own work in the same completion queue.
// Bits 0-15: slot, 32-47: port.
constexpr std::uint64_t kFlushWorkBit = std::uint64_t{1} << 63;
constexpr std::size_t flush_port(std::uint64_t wr_id) {
  return wr_id >> 32 & 0xffff;
}

}  // namespace verbatim
