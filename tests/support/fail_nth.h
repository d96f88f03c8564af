// "The Nth call of this name fails", and so many after it: what stands between the plugin and what it calls asks `now`
// in each call.
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
    left_ = nth;
    call_ = call;
  }
  void disarm() { call_ = nullptr; }
  // Since arm().
  bool has_failed() const { return left_ <= 0; }

  // The errno with which this call fails, else 0. Any thread.
  int now(const char* name) {
    const char* const wanted = call_;
    if (wanted == nullptr || std::strcmp(wanted, name) != 0) return 0;
    const long left = --left_;
    return left <= 0 && left > -times_ ? error_.load() : 0;
  }

 private:
  std::atomic<const char*> call_{nullptr};
  std::atomic<long> left_{0};
  std::atomic<long> times_{1};
  std::atomic<int> error_{0};
};

}  // namespace verbatim::test
