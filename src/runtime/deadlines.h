// A heap of objects by their next deadline. Each object knows its place, so that its deadline can change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace verbatim {

// T has the members `deadline_ns` and `heap_index`, which only this class changes. Only prepare() allocates.
template <typename T>
class Deadlines {
 public:
  // Before each add().
  void prepare() {
    if (heap_.size() == heap_.capacity()) heap_.reserve(heap_.size() + heap_.size() / 2 + 8);
  }
  void add(T& object, std::uint64_t deadline_ns) {
    heap_.push_back(&object);
    object.deadline_ns = deadline_ns;
    rise(heap_.size() - 1);
  }
  void remove(T& object) {
    for (std::size_t at = object.heap_index; at != 0; at = (at - 1) / 2) place(at, heap_[(at - 1) / 2]);
    T* const last = heap_.back();
    heap_.pop_back();
    if (heap_.empty()) return;
    heap_[0] = last;
    sink(0);
  }
  void set(T& object, std::uint64_t deadline_ns) {
    const bool sooner = deadline_ns < std::exchange(object.deadline_ns, deadline_ns);
    if (sooner) {
      rise(object.heap_index);
    } else {
      sink(object.heap_index);
    }
  }
  std::size_t size() const { return heap_.size(); }
  // nullptr: there is none.
  T* nearest() const { return heap_.empty() ? nullptr : heap_.front(); }
  std::uint64_t nearest_ns() const { return heap_.empty() ? kNever : heap_.front()->deadline_ns; }

 private:
  void place(std::size_t at, T* object) {
    heap_[at] = object;
    object->heap_index = static_cast<std::uint32_t>(at);
  }
  void rise(std::size_t at) {
    T* const object = heap_[at];
    for (; at != 0 && object->deadline_ns < heap_[(at - 1) / 2]->deadline_ns; at = (at - 1) / 2) {
      place(at, heap_[(at - 1) / 2]);
    }
    place(at, object);
  }
  void sink(std::size_t at) {
    T* const object = heap_[at];
    while (true) {
      std::size_t child = 2 * at + 1;
      if (child >= heap_.size()) break;
      if (child + 1 < heap_.size() && heap_[child + 1]->deadline_ns < heap_[child]->deadline_ns) ++child;
      if (heap_[child]->deadline_ns >= object->deadline_ns) break;
      place(at, heap_[child]);
      at = child;
    }
    place(at, object);
  }

  std::vector<T*> heap_;
};

}  // namespace verbatim
