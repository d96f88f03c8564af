// Bytes that one loaded object has allocated and not freed: what malloc and its kin, operator new and mmap gave to
// calls from that object, while liballocations.so (counting_allocator.cc) is preloaded.
#pragma once

#include <cstdint>
#include <string>

namespace verbatim::perf::cost {

class Allocations {
 public:
  // Starts to count for `object`, a path as the loader has it. Throws Failure when the library is not preloaded, or
  // the object is not loaded.
  explicit Allocations(const std::string& object);
  std::int64_t bytes() const;  // may be negative: what was there before is freed

 private:
  std::int64_t (*read_)() = nullptr;
};

}  // namespace verbatim::perf::cost
