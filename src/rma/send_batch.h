// Work requests for one QP that are posted together: one doorbell serves all of them. Puts, gets and signals are put
// here, and posted by the next test, by a call for another QP, or when the batch is full. Of the data path's thread.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstddef>

#include "verbs/qp.h"

namespace verbatim::rma {

struct PeerQueue;

// A work request of one segment.
struct WorkRequest {
  ibv_send_wr request = {};
  ibv_sge segment = {};
};

class SendBatch {
 public:
  // A program that keeps 32 puts under way has one doorbell for all of them.
  static constexpr int kOperations = 32;

  SendBatch() {
    for (std::size_t i = 0; i + 1 < work_.size(); ++i) {
      work_[i].request.next = &work_[i + 1].request;
      work_[i].request.sg_list = &work_[i].segment;
      work_[i].request.num_sge = 1;
    }
  }
  SendBatch(const SendBatch&) = delete;
  SendBatch& operator=(const SendBatch&) = delete;

  bool is_empty() const { return free_ == kOperations; }
  // Where the work requests go. Only of an empty batch it may be changed.
  PeerQueue* queue() const { return queue_; }
  void set_queue(PeerQueue* queue) { queue_ = queue; }

  // The next work request, to be filled in: everything but `next` and the list of one segment.
  WorkRequest& add() { return *end_++; }
  // Called after the work requests of each operation. True: the batch is full.
  bool end_operation() { return --free_ == 0; }

  // Posts all, and is empty. Returns what ibv_post_send returns.
  int post(ibv_qp* qp) {
    WorkRequest* const last = end_ - 1;
    end_ = work_.data();
    free_ = kOperations;
    last->request.next = nullptr;
    const int returned = post_send(qp, work_[0].request);
    last->request.next = &last[1].request;
    return returned;
  }

 private:
  // A put with a signal has two work requests. Linked; the last one is never used.
  std::array<WorkRequest, 2 * kOperations + 1> work_;
  WorkRequest* end_ = work_.data();
  int free_ = kOperations;  // operations
  PeerQueue* queue_ = nullptr;
};

}  // namespace verbatim::rma
