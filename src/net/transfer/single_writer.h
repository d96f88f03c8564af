// A number that one thread, that of the data path, changes and others may read. An addition is a load and a store,
// without a locked instruction, so it costs no more than a plain number.
#pragma once

#include <atomic>

namespace verbatim {

template <typename T>
class SingleWriter {
 public:
  constexpr SingleWriter(T value = {}) : value_(value) {}
  SingleWriter(const SingleWriter& other) : value_(static_cast<T>(other)) {}
  SingleWriter& operator=(const SingleWriter& other) { return *this = static_cast<T>(other); }

  operator T() const { return value_.load(std::memory_order_relaxed); }
  SingleWriter& operator=(T value) {
    value_.store(value, std::memory_order_relaxed);
    return *this;
  }
  SingleWriter& operator+=(T more) { return *this = static_cast<T>(*this + more); }
  SingleWriter& operator-=(T less) { return *this = static_cast<T>(*this - less); }
  T operator++() {
    const T value = static_cast<T>(*this + T{1});
    *this = value;
    return value;
  }

  // What was written before is read by a thread that has acquired this value.
  void publish(T value) { value_.store(value, std::memory_order_release); }
  T acquire() const { return value_.load(std::memory_order_acquire); }

  // Reads and clears; any thread.
  T take() { return value_.exchange(T{}, std::memory_order_relaxed); }

 private:
  std::atomic<T> value_;
};

}  // namespace verbatim
