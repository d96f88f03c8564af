// Whether a transfer makes sense, asked at both ends before anything is posted. Each kind of nonsense has its own code
// and one line with the values that do not go together. Linear in the number of blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "workload/kv/family.h"
#include "workload/kv/intervals.h"

namespace verbatim::kv {

enum class RejectionCode : std::uint8_t {
  kWrongFamily = 1,         // the handle is of another family
  kGeometryMismatch,        // of the same family, but made for another shape
  kCountMismatch,           // the two lists, or a list and its request, differ in length
  kLengthMismatch,          // the pieces of the two lists differ in length
  kBaseConflict,            // an address that is registered with blocks of another length
  kUnregistered,            // an address that nobody registered
  kIndexOutOfRange,         // a block that the family does not have
  kOverlappingDestination,  // a block that is written twice, or belongs to another request
};
constexpr int kRejectionCodes = 8;

const char* rejection_name(RejectionCode code);

struct Rejection {
  RejectionCode code;
  std::string text;
};

// What a list of blocks says about itself.
struct BlockList {
  FamilyId family = FamilyId::kKv;  // these two are the handle
  std::uint64_t geometry_hash = 0;
  std::uint64_t piece_bytes = 0;          // of each message
  std::uint64_t block_len = 0;            // distance between two blocks
  std::vector<std::uint64_t> bases = {};  // one a layer
  std::vector<std::uint32_t> blocks = {};
};

// A list of `blocks` of `family` with nothing wrong in it.
BlockList make_list(const Family& family, std::vector<std::uint32_t> blocks);

// A family as it is known at this end, own or the peer's as it introduced it, and the memory registered for it.
struct RegisteredFamily {
  RegisteredFamily(const Family& known, const IntervalSet& registered)
      : family(known), memory(registered), geometry_hash(known.geometry.hash()) {}
  const Family& family;
  const IntervalSet& memory;
  const std::uint64_t geometry_hash;  // of the family, which does not change
};

// `family` itself: overflow, and layers outside of registered memory. Asked once, when it is introduced.
std::optional<Rejection> validate_family(const RegisteredFamily& side);
// One list against the family that it claims to be of; `count` blocks are expected.
std::optional<Rejection> validate_list(const RegisteredFamily& side, const BlockList& list, std::size_t count);
// What two lists of one transfer must have in common.
std::optional<Rejection> validate_pair(const BlockList& source, const BlockList& destination);

// Which request each destination block belongs to.
class BlockReservations {
 public:
  explicit BlockReservations(std::size_t blocks) : holders_(blocks) {}
  // All of `blocks` for `request`, or none and why. An index beyond the end is kIndexOutOfRange.
  std::optional<Rejection> reserve(std::uint32_t request, std::span<const std::uint32_t> blocks);
  void release(std::span<const std::uint32_t> blocks);

 private:
  std::vector<std::uint64_t> holders_;  // request + 1, 0 for none
};

}  // namespace verbatim::kv
