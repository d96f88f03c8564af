// Work requests for one QP that are posted together: one doorbell serves all of them. Puts, gets and signals are put
// here, and posted by the next test, by a call for another QP, or when the batch is full. Of the data path's thread.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstddef>

namespace verbatim::rma {

struct PeerQueue;

// A work request of one segment.
struct WorkRequest {
  ibv_send_wr request = {};
  ibv_sge segment = {};
};

class SendBatch {
 public:
  // A put with a signal needs two.
  static constexpr std::size_t kMostWork = 16;

  SendBatch() {
    for (std::size_t i = 0; i < kMostWork; ++i) {
      work_[i].request.next = &work_[i + 1].request;
      work_[i].request.sg_list = &work_[i].segment;
      work_[i].request.num_sge = 1;
    }
  }
  SendBatch(const SendBatch&) = delete;
  SendBatch& operator=(const SendBatch&) = delete;

  bool is_empty() const { return end_ == work_.data(); }
  // There may be no place for the two work requests of a put with a signal.
  bool is_full() const { return end_ > work_.data() + kMostWork - 2; }
  // Where the work requests go. Only of an empty batch it may be changed.
  PeerQueue* queue() const { return queue_; }
  void set_queue(PeerQueue* queue) { queue_ = queue; }

  // The next work request, to be filled in: everything but `next` and the list of one segment.
  WorkRequest& add() { return *end_++; }

  // Posts all, and is empty. Returns what ibv_post_send returns.
  int post(ibv_qp* qp) {
    WorkRequest* const last = end_ - 1;
    end_ = work_.data();
    last->request.next = nullptr;
    ibv_send_wr* refused = nullptr;
    const int returned = ibv_post_send(qp, &work_[0].request, &refused);
    last->request.next = &last[1].request;
    return returned;
  }

 private:
  std::array<WorkRequest, kMostWork + 1> work_;  // linked; the last one is never used
  WorkRequest* end_ = work_.data();
  PeerQueue* queue_ = nullptr;
};

}  // namespace verbatim::rma
