// What ranks and their meeting point say to each other over TCP: a fixed header and a payload. Same-endian hosts only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "ranks/failure.h"

namespace verbatim::ranks {

enum class FrameKind : std::uint32_t {
  kHello = 1,  // rank to hub, first: a Hello
  kGather,     // rank to hub: this rank's part of an all-gather
  kGathered,   // hub to rank: the parts of all ranks, packed
  kFail,       // rank to hub: an ExitStatus and why this rank gives up
  kAbort,      // hub to rank: an ExitStatus to leave with, now
  kFinished,   // rank to hub: done
};

struct Hello {
  std::uint64_t token;
  std::uint32_t rank;
  std::uint32_t ranks;
};

struct Frame {
  FrameKind kind;
  std::string payload;
};

// Waits until all is with the system; false when the connection is gone or takes nothing for ten seconds.
bool send_frame(int socket, FrameKind kind, std::string_view payload);

// Takes bytes as they come and gives back whole frames.
class FrameReader {
 public:
  enum class State : std::uint8_t { kOpen, kClosed };

  // Reads what there is, without waiting. Closed: end of file, an error, or bytes that are not ours.
  State read(int socket);
  std::optional<Frame> next();

 private:
  std::string bytes_;
  bool broken_ = false;
};

// A plain value as a payload.
template <typename T>
std::string to_bytes(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
template <typename T>
T from_bytes(const std::string& bytes) {
  T value{};
  if (bytes.size() != sizeof value) throw Failure("the ranks are not of the same build");
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

std::string pack(const std::vector<std::string>& parts);
// Throws Failure when `packed` was not made by pack().
std::vector<std::string> unpack(std::string_view packed);

}  // namespace verbatim::ranks
