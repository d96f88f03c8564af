// SOFTVERBS_ORDERING=adaptive-routing: packets of one connection take different routes, and payloads of WRITEs reach
// memory in any order and with delay. The rules are in the InfiniBand specification, volume 1, 9.5 Transaction Ordering
// (its rule on the contents of an RDMA WRITE buffer), and 10.8.3 for completions and READs:
// - The target may rely on the contents of a WRITE once the message's immediate data or a later SEND has completed
// there,
//   or a later ATOMIC has changed memory. A later READ finds the data in place.
// - The initiator may rely on them once that WRITE or a later request has completed, because requests complete in
// order. Nothing else orders the bytes, not even those of one WRITE. Therefore ibv_query_qp_data_in_order returns 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace verbatim::softverbs {

// Bytes of a WRITE that was sent and passed the receiver's checks, and that are not in memory yet.
struct DeferredPayload {
  std::uint32_t position;  // of the request in the send queue
  std::uint64_t offset;    // in its message
  std::uint64_t bytes;
};

// The deferred payloads of one QP, and the random numbers that decide about them. Guarded by Qp::execution.
class DeferredPayloads {
 public:
  // If it is not called, payloads are placed when they are sent. Takes the memory for all payloads.
  void enable();
  // The same seed makes the same decisions.
  void seed(std::uint64_t seed) { state_ = seed; }
  bool is_enabled() const { return enabled_; }

  bool empty() const { return payloads_.empty(); }
  bool is_full() const { return payloads_.size() >= kMaxPayloads; }
  // Adds a run of bytes, split into random pieces. `address`: the target address of its first byte.
  void add(std::uint32_t position, std::uint64_t address, std::uint64_t offset, std::uint64_t bytes);
  void put_back(const DeferredPayload& payload) { payloads_.push_back(payload); }
  DeferredPayload take_random();
  void clear() { payloads_.clear(); }

  bool random_bool() { return random_below(2) == 0; }

  // Chooses the time by which all payloads must be in memory. Called when the first of them is deferred.
  void choose_deadline(std::uint64_t now_ns);
  bool is_deadline_passed(std::uint64_t now_ns) const { return now_ns >= deadline_ns_; }
  std::uint64_t deadline_ns() const { return deadline_ns_; }
  // The same for an engine without a thread, which counts polls instead of time. Each call counts one.
  bool is_last_poll() { return polls_left_ == 0 || --polls_left_ == 0; }

 private:
  static constexpr std::size_t kMaxPayloads = 64;

  std::uint64_t random_below(std::uint64_t limit);

  bool enabled_ = false;
  std::uint64_t state_ = 0;
  std::uint64_t deadline_ns_ = 0;
  std::uint32_t polls_left_ = 0;
  std::vector<DeferredPayload> payloads_;
};

}  // namespace verbatim::softverbs
