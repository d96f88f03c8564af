// Shared by the fuzzers. Each defines LLVMFuzzerTestOneInput.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace fuzz {

// Ends the process when an invariant, which must hold for every input, is violated.
inline void require(bool holds, const char* invariant) {
  if (holds) return;
  std::fprintf(stderr, "invariant violated: %s\n", invariant);
  std::abort();
}

// Reads values from the front of an input; zeros after its end.
class Input {
 public:
  explicit Input(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  template <typename T>
  T get() {
    T value{};
    const std::span<const std::uint8_t> raw = take(sizeof value);
    std::memcpy(&value, raw.data(), raw.size());
    return value;
  }
  // The next `count` bytes, or fewer at the end of the input.
  std::span<const std::uint8_t> take(std::size_t count) {
    const std::span<const std::uint8_t> front = bytes_.first(count < bytes_.size() ? count : bytes_.size());
    bytes_ = bytes_.subspan(front.size());
    return front;
  }
  std::span<const std::uint8_t> rest() const { return bytes_; }

 private:
  std::span<const std::uint8_t> bytes_;
};

}  // namespace fuzz
