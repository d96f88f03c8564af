#include "softverbs/ordering.h"

#include <algorithm>

namespace verbatim::softverbs {
namespace {

// Programs that poll for a word rely on one cache line at most: a message is cut between lines, never within.
constexpr std::uint64_t kLineBytes = 64;
constexpr std::uint64_t kMostPieces = 4;

// Long enough for another process to run in between, short enough for every timeout.
constexpr std::uint64_t kMostLateNs = 100'000;
constexpr std::uint32_t kMostLooks = 4;

}  // namespace

void LatePayloads::enable(std::uint64_t seed) {
  enabled_ = true;
  state_ = seed;
  payloads_.reserve(kMostPayloads + kMostPieces);
}

// SplitMix64. The remainder favours small numbers by less than one in 2^50.
std::uint64_t LatePayloads::draw(std::uint64_t sides) {
  state_ += 0x9e37'79b9'7f4a'7c15;
  std::uint64_t mixed = state_;
  mixed = (mixed ^ mixed >> 30) * 0xbf58'476d'1ce4'e5b9;
  mixed = (mixed ^ mixed >> 27) * 0x94d0'49bb'1331'11eb;
  return (mixed ^ mixed >> 31) % sides;
}

void LatePayloads::add(std::uint32_t position, std::uint64_t address, std::uint64_t offset, std::uint64_t bytes) {
  const std::uint64_t end = offset + bytes;
  for (std::uint64_t pieces = 1 + draw(kMostPieces); pieces > 1 && end - offset > kLineBytes; --pieces) {
    const std::uint64_t cut = address + 1 + draw(end - offset - 1);
    const std::uint64_t piece = std::min((cut + kLineBytes - 1) / kLineBytes * kLineBytes - address, end - offset);
    payloads_.push_back({position, offset, piece});
    address += piece;
    offset += piece;
  }
  if (offset != end) payloads_.push_back({position, offset, end - offset});
}

LatePayload LatePayloads::take_any() {
  std::swap(payloads_[draw(payloads_.size())], payloads_.back());
  const LatePayload taken = payloads_.back();
  payloads_.pop_back();
  return taken;
}

void LatePayloads::choose_end(std::uint64_t now_ns) {
  end_ns_ = now_ns + draw(kMostLateNs);
  looks_left_ = 1 + static_cast<std::uint32_t>(draw(kMostLooks));
}

}  // namespace verbatim::softverbs
