// The control messages between the two ends of a family's connection. They use one TCP socket per family and pair of
// ranks.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/unique_fd.h"
#include "nccl/types.h"
#include "ranks/failure.h"
#include "ranks/frame.h"
#include "workload/kv/fallback.h"
#include "workload/kv/validation.h"

namespace verbatim::kv {

// NCCL's tags are not negative, so tags are counted modulo 2^31.
constexpr std::uint32_t kTagMask = 0x7fffffff;

// D: sent by the decode side. P: sent by the prefill side.
enum class MessageKind : std::uint32_t {
  kJoin = 64,  // D: first message, which identifies the rank
  kOpen,       // D: the listen handle for generation N of the connection, and the decode side's family
  kOpened,     // P: connected; with the prefill side's family
  kMismatch,   // P: the families have different geometries
  kAnnounce,   // D: a request's destination blocks
  kAccept,     // P: the request's source blocks; the data follows
  kReject,     // both: a request is rejected; code and text
  kStaged,     // P: a part of a staged copy
  kNotify,     // P: all data of a request was sent and acknowledged
  kFailed,     // both: this generation of the connection failed
  kDone,       // D: the request has ended; its source blocks may be freed
  kFinished,   // D: no more requests
};

struct JoinMessage {
  std::uint64_t token;
  std::uint32_t family;
  std::uint32_t decode;
};

// Identifies an attempt to transfer a request.
struct Attempt {
  std::uint32_t request;
  std::uint32_t attempt;  // 0 for the first
  bool operator==(const Attempt&) const = default;
};

struct Notification {
  Attempt which;
  FamilyId family;
  std::uint64_t blocks;
  std::uint64_t bytes;
  std::uint32_t crc;
};

class Writer {
 public:
  template <typename T>
  Writer& put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  template <typename T>
  Writer& put_all(const std::vector<T>& values) {
    put(std::uint64_t{values.size()});
    bytes_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
    return *this;
  }
  Writer& put_text(std::string_view text) {
    put(std::uint64_t{text.size()});
    bytes_.append(text);
    return *this;
  }
  Writer& put_list(const BlockList& list);
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Reads what Writer wrote. Throws Failure when the bytes end early.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}
  template <typename T>
  T get() {
    T value{};
    read(&value, sizeof value);
    return value;
  }
  template <typename T>
  std::vector<T> get_all() {
    std::vector<T> values(count(sizeof(T)));
    read(values.data(), values.size() * sizeof(T));
    return values;
  }
  std::string get_text() {
    std::string text(count(1), '\0');
    read(text.data(), text.size());
    return text;
  }
  BlockList get_list();
  std::string_view rest() const { return rest_; }

 private:
  std::size_t count(std::size_t size);
  void read(void* into, std::size_t bytes);

  std::string_view rest_;
};

// A family and the memory registered for it, as one end describes it to the other.
struct FamilyDescription {
  Family family;
  IntervalSet memory;
};
void put_family(Writer& writer, const Family& family, const IntervalSet& memory);
FamilyDescription get_family(Reader& reader);

// A TCP connection with framed messages. Used by the family's thread only.
class Channel {
 public:
  struct Message {
    MessageKind kind;
    std::string payload;
  };

  Channel() = default;
  explicit Channel(UniqueFd socket, ranks::FrameReader reader = ranks::FrameReader())
      : socket_(std::move(socket)), reader_(std::move(reader)) {}

  // Throws Failure when the peer has closed the connection.
  void send(MessageKind kind, std::string_view payload) const;
  // Reads what has arrived, without waiting.
  void receive();
  // The next complete message. Throws Failure when there is none and the peer has closed the connection.
  std::optional<Message> next();

 private:
  UniqueFd socket_;
  ranks::FrameReader reader_;
  bool closed_ = false;
};

}  // namespace verbatim::kv
