// How a polling loop spends its turns: ranks may outnumber the cores, so who has nothing to do lets the others run.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <cstdint>

namespace verbatim::kv {

class PollBackoff {
 public:
  void after_round(bool moved) {
    ++rounds_;
    idle_rounds_ = moved ? 0 : idle_rounds_ + 1;
    if (idle_rounds_ > kYields) {
      usleep(kSleepUs);
    } else if (idle_rounds_ > 0) {
      sched_yield();
    }
  }
  // The sockets are asked at every turn only while nothing else moves: each time is a system call.
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
