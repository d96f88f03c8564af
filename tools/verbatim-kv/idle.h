// How a polling loop spends its turns: ranks may outnumber the cores, so who has nothing to do lets the others run.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <cstdint>

namespace verbatim::kv {

class Idle {
 public:
  void turn(bool moved) {
    ++turns_;
    vain_ = moved ? 0 : vain_ + 1;
    if (vain_ > kYields) {
      usleep(kNapUs);
    } else if (vain_ > 0) {
      sched_yield();
    }
  }
  // The sockets are asked at every turn only while nothing else moves: each time is a system call.
  bool time_to_listen() const { return vain_ > 0 || turns_ % kTurnsBetween == 0; }
  bool waited() const { return vain_ > 0; }

 private:
  static constexpr std::uint32_t kYields = 200;
  static constexpr useconds_t kNapUs = 50;
  static constexpr std::uint32_t kTurnsBetween = 16;

  std::uint32_t turns_ = 0;
  std::uint32_t vain_ = 0;
};

}  // namespace verbatim::kv
