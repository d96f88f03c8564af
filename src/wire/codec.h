// Writer and Reader of messages with little-endian fields. One template can write and read a message, because both have
// fields(). After a read beyond the end of the message, a Reader returns zeros or leaves fields unchanged, and
// complete() is false: callers check it once, after the last field.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "wire/address.h"
#include "wire/limits.h"

namespace verbatim::wire {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "fields are copied in the byte order of memory");

class Writer {
 public:
  template <typename... T>
  explicit Writer(const T&... values) {
    fields(values...);
  }
  template <typename T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    append(&value, sizeof value);
  }
  // A byte with the length, then the text, which is cut to 255 bytes.
  void put(const std::string& text) {
    const auto count = static_cast<std::uint8_t>(text.size() < 255 ? text.size() : 255);
    put(count);
    append(text.data(), count);
  }
  template <typename... T>
  void fields(const T&... values) {
    (put(values), ...);
  }
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
    T value{};
    read(value);
    return value;
  }
  template <typename... T>
  void fields(T&... values) {
    (read(values), ...);
  }
  bool complete() const { return !truncated_; }

 private:
  template <typename T>
  void read(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (const std::uint8_t* raw = consume(sizeof value)) std::memcpy(&value, raw, sizeof value);
  }
  void read(bool& value) { value = get<std::uint8_t>() != 0; }
  // Replaces characters that are not printable by '?', because the text is from a peer and goes into log lines.
  void read(std::string& text) {
    const std::size_t count = get<std::uint8_t>();
    const std::uint8_t* raw = consume(count);
    if (raw == nullptr) return;
    text.assign(reinterpret_cast<const char*>(raw), count);
    for (char& c : text) {
      if (c < ' ' || c > '~') c = '?';
    }
  }
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

// The fields of a HelloDevice and of a HelloQp, in the order of messages. `Codec`: a Writer or a Reader.
template <typename Codec, typename Device>
void code_device(Codec& codec, Device& device) {
  codec.fields(device.gid, device.control_rkey, device.max_message_bytes, device.speed_mbps, device.lid,
               device.link_layer, device.grh_required, device.mtu, device.port, device.gid_index,
               device.responder_reads, device.name);
}
template <typename Codec, typename Qp>
void code_qp(Codec& codec, Qp& qp) {
  codec.fields(qp.number, qp.device, qp.has_ece);
  if (qp.has_ece) codec.fields(qp.ece);
}

// A list of addresses: a byte with their number, then each.
inline void put_addresses(Writer& writer, const std::vector<Address>& addresses) {
  writer.put(static_cast<std::uint8_t>(addresses.size()));
  for (const Address& address : addresses) writer.fields(address.ip, address.port);
}
// False: more than kMaxAddresses.
inline bool get_addresses(Reader& reader, std::vector<Address>& addresses) {
  const std::size_t count = reader.get<std::uint8_t>();
  if (count > kMaxAddresses) return false;
  addresses.resize(count);
  for (Address& address : addresses) reader.fields(address.ip, address.port);
  return true;
}

}  // namespace verbatim::wire
