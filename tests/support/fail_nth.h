// Makes the Nth call of a given name fail, and optionally calls after it. Libraries between the plugin and the
// functions that it calls ask next_error() in each call.
#pragma once

#include <atomic>
#include <cstring>

namespace verbatim::test {

class FailNth {
 public:
  // `call` must stay valid until the next arm() or disarm().
  void arm(const char* call, long nth, int error, long times = 1) {
    disarm();
    error_ = error;
    times_ = times;
    remaining_ = nth;
    call_ = call;
  }
  void disarm() { call_ = nullptr; }
  // Whether a call has failed since arm().
  bool has_failed() const { return remaining_ <= 0; }

  // Counts this call. Returns the errno with which it must fail; 0 when it must not fail. May be called from any
  // thread.
  int next_error(const char* name) {
    const char* const wanted = call_;
    if (wanted == nullptr || std::strcmp(wanted, name) != 0) return 0;
    const long remaining = --remaining_;
    return remaining <= 0 && remaining > -times_ ? error_.load() : 0;
  }

 private:
  std::atomic<const char*> call_{nullptr};
  std::atomic<long> remaining_{0};
  std::atomic<long> times_{1};
  std::atomic<int> error_{0};
};

}  // namespace verbatim::test
