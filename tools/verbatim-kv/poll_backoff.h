// Backs off in a polling loop without progress. Ranks may outnumber the cores, so an idle rank gives up the CPU: it
// yields at first, then sleeps.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <cstdint>

namespace verbatim::kv {

class PollBackoff {
 public:
  void after_round(bool progressed) {
    ++rounds_;
    idle_rounds_ = progressed ? 0 : idle_rounds_ + 1;
    if (idle_rounds_ > kYields) {
      usleep(kSleepUs);
    } else if (idle_rounds_ > 0) {
      sched_yield();
    }
  }
  // Polling a socket is a system call. While other work makes progress it is done only every kRoundsBetweenPolls
  // rounds.
  bool should_poll_sockets() const { return idle_rounds_ > 0 || rounds_ % kRoundsBetweenPolls == 0; }
  bool is_idle() const { return idle_rounds_ > 0; }

 private:
  static constexpr std::uint32_t kYields = 200;
  static constexpr useconds_t kSleepUs = 50;
  static constexpr std::uint32_t kRoundsBetweenPolls = 16;

  std::uint32_t rounds_ = 0;
  std::uint32_t idle_rounds_ = 0;
};

}  // namespace verbatim::kv
