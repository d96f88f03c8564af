// Waits for what must happen: how long they last, and what they say when it has not happened.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>

namespace verbatim::test {

// Much longer than a busy machine needs for what must happen, and shorter than the limit of a test in meson.build. Such
// a wait ends with its event, so a long limit costs nothing.
constexpr std::chrono::seconds kPatience{60};

// g++ says by macros, clang++ by features with which sanitizer it compiles.
#if defined(__has_feature)
constexpr bool kHasAddressSanitizer = __has_feature(address_sanitizer);
constexpr bool kHasThreadSanitizer = __has_feature(thread_sanitizer);
#else
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kHasAddressSanitizer = true;
#else
constexpr bool kHasAddressSanitizer = false;
#endif
#if defined(__SANITIZE_THREAD__)
constexpr bool kHasThreadSanitizer = true;
#else
constexpr bool kHasThreadSanitizer = false;
#endif
#endif
constexpr bool kIsSanitized = kHasAddressSanitizer || kHasThreadSanitizer;

// A limit that a test waits for, so that it must be short: twice as long with a sanitizer, which makes programs slower.
template <typename Limit>
constexpr Limit scaled(Limit limit) {
  return kIsSanitized ? 2 * limit : limit;
}

// The line of a source in which a default argument of this type is used.
struct SourceLine {
  const char* file;
  int line;

  static constexpr SourceLine here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// The longest time between two looks.
class Pauses {
 public:
  using Clock = std::chrono::steady_clock;

  Clock::time_point look() {
    const Clock::time_point now = Clock::now();
    longest_ = std::max(longest_, now - std::exchange(last_, now));
    return now;
  }
  Clock::time_point last() const { return last_; }
  Clock::duration longest() const { return longest_; }

 private:
  Clock::time_point last_ = Clock::now();
  Clock::duration longest_{};
};

// One wait: call is_over() after each look that found nothing, and rest() before the next one.
class Wait {
 public:
  using Clock = Pauses::Clock;

  explicit Wait(Clock::duration limit) : limit_(limit) {}

  bool is_over() { return pauses_.look() >= begin_ + limit_; }
  // Yields the processor. What takes longer than data is a timeout or another process: a wait for it sleeps, so that
  // the tests beside it have the processor.
  void rest() const {
    if (pauses_.last() - begin_ < std::chrono::milliseconds(50)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  // What is waited for comes nearer: the limit counts from now on.
  void begin_again() { begin_ = pauses_.look(); }
  // "after 60000 ms; the longest pause of this process meanwhile was 12 ms".
  std::string report() const {
    return "after " + to_ms(limit_) + "; the longest pause of this process meanwhile was " + to_ms(pauses_.longest());
  }
  // The same on stderr, where the failure of a check shows only that the wait has ended.
  void print_report(const SourceLine& line) const {
    std::fprintf(stderr, "%s:%d: what is waited for here has not come %s\n", line.file, line.line, report().c_str());
  }

 private:
  static std::string to_ms(Clock::duration time) {
    return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(time).count()) + " ms";
  }

  const Clock::duration limit_;
  Clock::time_point begin_ = Clock::now();
  Pauses pauses_;
};

}  // namespace verbatim::test
