// What both ends do in test and progress: poll, complete, look at the flags. A template, so that the data path has no
// virtual call. `Derived` has, for its request type: complete(completion), complete_simple(completion), which completes
// it only if it is of the most frequent kind, retire(request, done, sizes), and resume_pending_post().
#pragma once

#include "net/transfer/comm.h"

namespace verbatim {

template <typename Derived>
class CommProgress : public Comm {
 public:
  // Polls once, and does what completions and flags ask for.
  [[gnu::noinline]] void progress() {
    const int polled = poll_first_cq();
    for (int i = 0; i < polled; ++i) derived().complete(completions_[i]);
    if (slow_path_flags() != 0 || polled < 0) run_slow_path(polled);
  }

 protected:
  using Comm::Comm;

  // Whether `request` is done; if so it is free again and `*sizes` (which may be nullptr) has its bytes.
  template <typename R>
  [[gnu::always_inline]] static inline ErrorKind test_request(R& request, int* done, int* sizes) noexcept {
    if (request.state != RequestState::kDone) return poll_and_test(request, done, sizes);
    return Derived::retire(request, done, sizes);
  }

  // Completions in completions_ from the first completion queue: how many, negative when polling failed.
  int poll_first_cq() { return ibv_poll_cq(first_cq_, kPollBatch, completions_); }

 private:
  Derived& derived() { return static_cast<Derived&>(*this); }

  // Usually there is nothing, or one completion of the most frequent kind, which needs no other call.
  template <typename R>
  [[gnu::noinline]] static ErrorKind poll_and_test(R& request, int* done, int* sizes) noexcept {
    Derived& comm = *static_cast<Derived*>(request.comm);
    const int polled = comm.poll_first_cq();
    if (polled == 0 && comm.slow_path_flags() == 0) {
      comm.tested_ = true;
      *done = 0;
      return ErrorKind::kNone;
    }
    const bool simple = polled == 1 && comm.complete_simple(comm.completions_[0]);
    if (simple && request.state == RequestState::kDone) return Derived::retire(request, done, sizes);
    return process_completions(request, done, sizes, simple ? 0 : polled);
  }

  template <typename R>
  [[gnu::noinline]] static ErrorKind process_completions(R& request, int* done, int* sizes, int polled) noexcept {
    Derived& comm = *static_cast<Derived*>(request.comm);
    comm.tested_ = true;
    for (int i = 0; i < polled; ++i) comm.complete(comm.completions_[i]);
    if (comm.slow_path_flags() != 0 || polled < 0) comm.run_slow_path(polled);
    if (request.state == RequestState::kDone) return Derived::retire(request, done, sizes);
    *done = 0;
    return comm.result();
  }

  // After a poll of the first queue that found `polled`: the other queues, failures, signals, a pending message.
  [[gnu::noinline]] void run_slow_path(int polled) {
    bool all_polled = polled < kPollBatch;
    bool poll_failed = polled < 0;
    for (const UniqueCq& cq : endpoint_.cqs().subspan(1)) {
      const int count = ibv_poll_cq(cq.get(), kPollBatch, completions_);
      for (int i = 0; i < count; ++i) derived().complete(completions_[i]);
      all_polled = all_polled && count < kPollBatch;
      poll_failed = poll_failed || count < 0;
    }
    if (poll_failed) fail_poll();
    if (failure_state_.completion_held()) {
      for (const UniqueCq& cq : endpoint_.cqs()) {
        int count = 0;
        // No more than the queue can hold: a peer that keeps sending must not keep this call from returning.
        for (int left = cq.get()->cqe; left > 0 && (count = ibv_poll_cq(cq.get(), kPollBatch, completions_)) > 0;
             left -= count) {
          for (int i = 0; i < count; ++i) derived().complete(completions_[i]);
        }
      }
      log_held_completion();
    }
    if (all_polled) check_signals(false);
    derived().resume_pending_post();
  }
};

}  // namespace verbatim
