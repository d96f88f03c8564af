// Bytes that one loaded object has allocated and not freed, by malloc and its variants, operator new and mmap. The
// calls are counted by libverbatim-counting-allocator.so (counting_allocator.cc), which must be preloaded.
#pragma once

#include <cstdint>
#include <string>

namespace verbatim::perf::cost {

class Allocations {
 public:
  // Starts to count for `object`, the path of a loaded object as the dynamic loader reports it. Throws Failure when the
  // library is not preloaded or the object is not loaded.
  explicit Allocations(const std::string& object);
  std::int64_t bytes() const;  // negative when more of the earlier allocations was freed than allocated since

 private:
  std::int64_t (*read_)() = nullptr;
};

}  // namespace verbatim::perf::cost
