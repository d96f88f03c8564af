// What send and recv comms do in test and progress: poll the CQs, process the completions, test the slow path flags. A
// template, so that the data path has no virtual call. `Derived` defines
//   complete(completion)           processes any completion
//   complete_simple(completion)    processes a completion of the most frequent kind and returns true; any other
//                                  completion is left alone, and the result is false
//   retire<kTimed>(request, done, sizes)   frees a request that is done and reports its sizes; kTimed: latencies are
//                                  measured
//   resume_pending_post()          continues a post that waits for free send work requests
#pragma once

#include "net/transfer/comm.h"

namespace verbatim {

template <typename Derived>
class CommProgress : public Comm {
 public:
  // Polls the first CQ and processes its completions. If a slow path flag is set, run_slow_path() does the rest.
  // If it were inlined, a receive with an arrival word would take 89 instructions to test instead of 81.
  [[gnu::noinline]] void progress() {
    const int polled = poll_first_cq();
    for (int i = 0; i < polled; ++i) derived().complete(completions_[i]);
    if (slow_path_flags() != 0 || polled < 0) run_slow_path(polled);
  }

 protected:
  using Comm::Comm;

  // Sets `*done` to whether `request` is done. A request that is done is freed, and its sizes are stored in `sizes`
  // (may be nullptr).
  template <bool kTimed, typename R>
  static ErrorKind test_request(R& request, int* done, int* sizes) noexcept {
    if (request.state != RequestState::kDone) return poll_and_test<kTimed>(request, done, sizes);
    return Derived::template retire<kTimed>(request, done, sizes);
  }

  // Stores completions of the first CQ in completions_. Returns their number, negative when polling failed.
  int poll_first_cq() { return ibv_poll_cq(first_cq_, kPollBatch, completions_); }

 private:
  Derived& derived() { return static_cast<Derived&>(*this); }

  // Short for the two frequent results of a poll: no completion, or one completion of the most frequent kind. If it
  // were inlined, a member of a group of eight would take 220 instructions instead of 209 (g++ 12, as in tests/perf).
  template <bool kTimed, typename R>
  [[gnu::noinline]] static ErrorKind poll_and_test(R& request, int* done, int* sizes) noexcept {
    Derived& comm = *static_cast<Derived*>(request.comm);
    const int polled = comm.poll_first_cq();
    if (polled == 0 && comm.slow_path_flags() == 0) {
      comm.tested_ = true;
      *done = 0;
      return ErrorKind::kNone;
    }
    const bool simple = polled == 1 && comm.complete_simple(comm.completions_[0]);
    if (simple && request.state == RequestState::kDone) return Derived::template retire<kTimed>(request, done, sizes);
    return process_completions<kTimed>(request, done, sizes, simple ? 0 : polled);
  }

  // If it were inlined, a message alone would take 420 instructions instead of 409, a test without completion 41
  // instead of 35.
  template <bool kTimed, typename R>
  [[gnu::noinline]] static ErrorKind process_completions(R& request, int* done, int* sizes, int polled) noexcept {
    Derived& comm = *static_cast<Derived*>(request.comm);
    comm.tested_ = true;
    for (int i = 0; i < polled; ++i) comm.complete(comm.completions_[i]);
    if (comm.slow_path_flags() != 0 || polled < 0) comm.run_slow_path(polled);
    if (request.state == RequestState::kDone) return Derived::template retire<kTimed>(request, done, sizes);
    *done = 0;
    return comm.result();
  }

  // `polled` is the result of poll_first_cq(). Polls the other CQs, logs a failed completion, processes comm events,
  // advances lanes that fail, and continues a pending post.
  void run_slow_path(int polled) {
    bool all_polled = polled < kPollBatch;
    if (polled < 0) fail_poll(0);
    const std::span<const UniqueCq> cqs = endpoint_.cqs();
    for (std::size_t cq = 1; cq < cqs.size(); ++cq) {
      const int count = ibv_poll_cq(cqs[cq].get(), kPollBatch, completions_);
      for (int i = 0; i < count; ++i) derived().complete(completions_[i]);
      all_polled = all_polled && count < kPollBatch;
      if (count < 0) fail_poll(cq);
    }
    if (failure_state_.completion_held()) {
      for (const UniqueCq& cq : endpoint_.cqs()) {
        int count = 0;
        // At most as many completions as the CQ can hold, so that this call returns even if the peer keeps sending.
        for (int left = cq.get()->cqe; left > 0 && (count = ibv_poll_cq(cq.get(), kPollBatch, completions_)) > 0;
             left -= count) {
          for (int i = 0; i < count; ++i) derived().complete(completions_[i]);
        }
      }
      log_held_completion();
    }
    if (all_polled) check_events(false);
    if (lanes_change()) process_lanes(all_polled);
    derived().resume_pending_post();
  }
};

}  // namespace verbatim
