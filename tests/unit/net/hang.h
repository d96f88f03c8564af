// A verb of a device that hangs.
#pragma once

#include <infiniband/verbs.h>

#include <condition_variable>
#include <mutex>
#include <string>

#include "connected_comms.h"

namespace verbatim {

// One verb of one device that does not return until the test ends the hang. If the test itself waits for it, it returns
// after kPatience, and has expired.
class Hang {
 public:
  void begin(const std::string& verb, const ibv_context* context) {
    const std::lock_guard lock(mutex_);
    verb_ = verb;
    context_ = context;
  }
  void end() {
    const std::lock_guard lock(mutex_);
    context_ = nullptr;
    ended_.notify_all();
  }
  void enter(const char* verb, const ibv_context* context) {
    std::unique_lock lock(mutex_);
    if (context_ != context || verb_ != verb) return;
    entered_ = true;
    if (!ended_.wait_for(lock, ConnectedComms::kPatience, [&] { return context_ == nullptr; })) expired_ = true;
  }
  bool entered() const {
    const std::lock_guard lock(mutex_);
    return entered_;
  }
  bool expired() const {
    const std::lock_guard lock(mutex_);
    return expired_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  std::string verb_;
  const ibv_context* context_ = nullptr;
  bool entered_ = false;
  bool expired_ = false;
};

}  // namespace verbatim
