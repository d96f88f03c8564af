// The messages between ranks and their coordinator over TCP: a fixed header and a payload. All machines must have the
// same byte order.
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
  kHello = 1,  // rank to coordinator, first frame: a Hello
  kGather,     // rank to coordinator: this rank's part of an all-gather
  kGathered,   // coordinator to rank: the parts of all ranks, packed
  kFail,       // rank to coordinator: an ExitStatus and why this rank fails
  kAbort,      // coordinator to rank: exit at once with this ExitStatus; the reason
  kFinished,   // rank to coordinator: the rank is done
  kWelcome,    // coordinator to rank: the hello is accepted; a Welcome
  kRefused,    // coordinator to rank: an ExitStatus and why the hello is not accepted
  kBusy,       // coordinator to rank: an earlier job has not ended, try again
};

struct Hello {
  std::uint64_t token;  // of the job; not used at a local socket, whose listener knows the user of the rank
  std::uint32_t rank;
  std::uint32_t ranks;
};

// The payload of kWelcome.
struct Welcome {
  std::uint64_t token;
  std::uint64_t comm_id;
};

constexpr std::size_t kMaxPayloadBytes = std::size_t{256} << 20;

struct Frame {
  FrameKind kind;
  std::string payload;
};

// Waits until the kernel has accepted all bytes. Returns false when the connection is closed or the kernel accepts
// nothing for ten seconds.
bool send_frame(int socket, FrameKind kind, std::string_view payload);

// Collects received bytes and returns complete frames.
class FrameReader {
 public:
  enum class State : std::uint8_t { kOpen, kClosed };

  // A longer frame is invalid.
  explicit FrameReader(std::size_t max_payload_bytes = kMaxPayloadBytes) : max_payload_bytes_(max_payload_bytes) {}
  void allow(std::size_t max_payload_bytes) { max_payload_bytes_ = max_payload_bytes; }

  // Reads available bytes without waiting, as many as the longest frame has at most. kClosed: end of file, an error, or
  // an invalid frame header.
  State read(int socket);
  std::optional<Frame> next();

 private:
  std::size_t max_payload_bytes_;
  std::string bytes_;
  bool broken_ = false;
};

// Converts a trivially copyable value to and from a payload.
template <typename T>
std::string to_bytes(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
template <typename T>
T from_bytes(const std::string& bytes) {
  T value{};
  if (bytes.size() != sizeof value) throw Failure("the ranks run different builds of this program");
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

// The payload of kFail, kAbort and kRefused.
struct Reason {
  ExitStatus status = ExitStatus::kFailed;
  std::string text = {};
};
std::string to_payload(const Reason& reason);
Reason reason_in(const std::string& payload);

std::string pack(const std::vector<std::string>& parts);
// Throws Failure when `packed` was not made by pack().
std::vector<std::string> unpack(std::string_view packed);

}  // namespace verbatim::ranks
