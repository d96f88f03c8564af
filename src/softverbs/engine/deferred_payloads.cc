#include "softverbs/engine/deferred_payloads.h"

#include <algorithm>

namespace verbatim::softverbs {
namespace {

// Programs that poll for a word rely on one cache line at most: payloads are split between lines, never within one.
constexpr std::uint64_t kLineBytes = 64;
constexpr std::uint64_t kMaxPieces = 4;

// Long enough for another process to run in between, and shorter than every timeout.
constexpr std::uint64_t kMaxDeferNs = 100'000;
constexpr std::uint32_t kMaxPolls = 4;

}  // namespace

void DeferredPayloads::enable() {
  enabled_ = true;
  payloads_.reserve(kMaxPayloads + kMaxPieces);
}

// splitmix64. The remainder is biased towards small numbers by less than 2^-50.
std::uint64_t DeferredPayloads::random_below(std::uint64_t limit) {
  state_ += 0x9e37'79b9'7f4a'7c15;
  std::uint64_t mixed = state_;
  mixed = (mixed ^ mixed >> 30) * 0xbf58'476d'1ce4'e5b9;
  mixed = (mixed ^ mixed >> 27) * 0x94d0'49bb'1331'11eb;
  return (mixed ^ mixed >> 31) % limit;
}

void DeferredPayloads::add(std::uint32_t position, std::uint64_t address, std::uint64_t offset, std::uint64_t bytes) {
  const std::uint64_t end = offset + bytes;
  for (std::uint64_t pieces = 1 + random_below(kMaxPieces); pieces > 1 && end - offset > kLineBytes; --pieces) {
    const std::uint64_t cut = address + 1 + random_below(end - offset - 1);
    const std::uint64_t piece = std::min((cut + kLineBytes - 1) / kLineBytes * kLineBytes - address, end - offset);
    payloads_.push_back({position, offset, piece});
    address += piece;
    offset += piece;
  }
  if (offset != end) payloads_.push_back({position, offset, end - offset});
}

DeferredPayload DeferredPayloads::take_random() {
  std::swap(payloads_[random_below(payloads_.size())], payloads_.back());
  const DeferredPayload payload = payloads_.back();
  payloads_.pop_back();
  return payload;
}

void DeferredPayloads::choose_deadline(std::uint64_t now_ns) {
  deadline_ns_ = now_ns + random_below(kMaxDeferNs);
  polls_left_ = 1 + static_cast<std::uint32_t>(random_below(kMaxPolls));
}

}  // namespace verbatim::softverbs
