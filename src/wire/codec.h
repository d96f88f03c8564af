// Writer and Reader of messages with little-endian fields. After a read beyond the end of the message, a Reader returns
// zeros, and complete() is false: callers check it once, after the last field.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace verbatim::wire {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "fields are copied in the byte order of memory");

class Writer {
 public:
  template <typename T>
  void put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    append(&value, sizeof value);
  }
  // A byte with the length, then the text, which is cut to 255 bytes.
  void put_text(const std::string& text) {
    const auto count = static_cast<std::uint8_t>(text.size() < 255 ? text.size() : 255);
    put(count);
    append(text.data(), count);
  }
  template <typename T>
  void overwrite(std::size_t offset, T value) {
    std::memcpy(bytes_.data() + offset, &value, sizeof value);
  }
  std::size_t size() const { return bytes_.size(); }
  std::vector<std::uint8_t> take() && { return std::move(bytes_); }

 private:
  void append(const void* raw, std::size_t count) {
    const auto* bytes = static_cast<const std::uint8_t*>(raw);
    for (std::size_t i = 0; i < count; ++i) bytes_.push_back(bytes[i]);
  }

  std::vector<std::uint8_t> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  template <typename T>
  T get() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    if (const std::uint8_t* raw = consume(sizeof value)) std::memcpy(&value, raw, sizeof value);
    return value;
  }
  // Replaces characters that are not printable by '?', because the text is from a peer and goes into log lines.
  std::string get_text() {
    const std::size_t count = get<std::uint8_t>();
    const std::uint8_t* raw = consume(count);
    if (raw == nullptr) return {};
    std::string text(reinterpret_cast<const char*>(raw), count);
    for (char& c : text) {
      if (c < ' ' || c > '~') c = '?';
    }
    return text;
  }
  void skip(std::size_t count) { consume(count); }
  bool complete() const { return !truncated_; }

 private:
  const std::uint8_t* consume(std::size_t count) {
    if (truncated_ || bytes_.size() - position_ < count) {
      truncated_ = true;
      return nullptr;
    }
    const std::uint8_t* raw = bytes_.data() + position_;
    position_ += count;
    return raw;
  }

  std::span<const std::uint8_t> bytes_;
  std::size_t position_ = 0;
  bool truncated_ = false;
};

}  // namespace verbatim::wire
