// What the fuzzers share. Each gives libFuzzer its one function; without libFuzzer a main of ours replays the corpus.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace fuzz {

// A promise that no input may break.
inline void require(bool holds, const char* invariant) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", invariant);
  std::abort();
}

// Takes an input apart from its front; zeros where it has ended.
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
  // At most `count` bytes.
  std::span<const std::uint8_t> take(std::size_t count) {
    const std::span<const std::uint8_t> taken = bytes_.first(count < bytes_.size() ? count : bytes_.size());
    bytes_ = bytes_.subspan(taken.size());
    return taken;
  }
  std::span<const std::uint8_t> rest() const { return bytes_; }

 private:
  std::span<const std::uint8_t> bytes_;
};

}  // namespace fuzz
