// SOFTVERBS_ORDERING=adaptive-routing: packets of one connection travel different ways, and the payloads of WRITEs come
// to memory in any order, some of them late. What that may look like to a program is in the InfiniBand specification,
// volume 1, 9.5 Transaction Ordering (its rule on the contents of an RDMA WRITE buffer), and 10.8.3 for completions and
// READs: nobody may depend on what a WRITE's target holds before the message's immediate data or a later SEND has
// completed there or a later ATOMIC has changed memory; a READ that follows finds the data in place. The program that
// posted may depend on it once that WRITE or a request behind it has completed, as completions come in the order of the
// requests. Nothing else orders the bytes, not even those of one WRITE: hence the answer of ibv_query_qp_data_in_order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace verbatim::softverbs {

// Some bytes of a WRITE that was sent, passed the receiver's checks, and has not reached memory.
struct DeferredPayload {
  std::uint32_t position;  // of the request in the send queue
  std::uint64_t offset;    // in its message
  std::uint64_t bytes;
};

// Those of one QP, with the dice that decide about them; under Qp::execution.
class DeferredPayloads {
 public:
  // Never called: payloads are placed as they are sent. Otherwise the same seed makes the same decisions.
  void enable(std::uint64_t seed);
  bool is_enabled() const { return enabled_; }

  bool empty() const { return payloads_.empty(); }
  bool is_full() const { return payloads_.size() >= kMaxPayloads; }
  // Takes in a run of bytes, in one piece or in some. `address`: where the first of them will lie.
  void add(std::uint32_t position, std::uint64_t address, std::uint64_t offset, std::uint64_t bytes);
  void put_back(const DeferredPayload& payload) { payloads_.push_back(payload); }
  DeferredPayload take_random();
  void clear() { payloads_.clear(); }

  bool random_bool() { return random_below(2) == 0; }

  // When the latest of what is sent now must be in memory: chosen when the first of it is sent.
  void choose_deadline(std::uint64_t now_ns);
  bool is_deadline_passed(std::uint64_t now_ns) const { return now_ns >= deadline_ns_; }
  std::uint64_t deadline_ns() const { return deadline_ns_; }
  // The same, for an engine that has no thread and so no time of its own: counts this look.
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
