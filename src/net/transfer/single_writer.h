// A number that one thread, the data path's, changes and others may look at. As cheap as a plain one: an addition is a
// load and a store, no locked instruction.
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

  // Of a mark that the data path sets and an onlooker takes back: whether it was set.
  T take() { return value_.exchange(T{}, std::memory_order_relaxed); }

 private:
  std::atomic<T> value_;
};

}  // namespace verbatim
