// Checks the description of a transfer at both ends before anything is posted. Each kind of error has its own code and
// one line of text with the values that disagree. Time is linear in the number of blocks.
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
  kGeometryMismatch,        // the handle is of the same family, but of another geometry
  kCountMismatch,           // the two lists, or a list and its request, differ in length
  kLengthMismatch,          // the pieces of the two lists differ in length
  kBaseConflict,            // an address that is registered with blocks of another length
  kUnregistered,            // an address in no registration
  kIndexOutOfRange,         // a block number that the family does not have
  kOverlappingDestination,  // a block that is listed twice or belongs to another request
};
constexpr int kRejectionCodes = 8;

const char* rejection_name(RejectionCode code);

struct Rejection {
  RejectionCode code;
  std::string text;
};

// A list of blocks with its own description of the family.
struct BlockList {
  FamilyId family = FamilyId::kKv;  // family and geometry_hash together are the handle
  std::uint64_t geometry_hash = 0;
  std::uint64_t piece_bytes = 0;          // of one message
  std::uint64_t block_len = 0;            // distance between the starts of two blocks
  std::vector<std::uint64_t> bases = {};  // start address of each layer
  std::vector<std::uint32_t> blocks = {};
};

// A valid list of `blocks` of `family`.
BlockList make_list(const Family& family, std::vector<std::uint32_t> blocks);

// A family as this end knows it (its own, or the peer's from the peer's description), and the memory registered for it.
struct RegisteredFamily {
  RegisteredFamily(const Family& known, const IntervalSet& registered)
      : family(known), memory(registered), geometry_hash(known.geometry.hash()) {}
  const Family& family;
  const IntervalSet& memory;
  const std::uint64_t geometry_hash;  // computed once: the geometry does not change
};

// Checks `family` itself: overflow, and layers outside of registered memory. Called once, when the family is announced.
std::optional<Rejection> validate_family(const RegisteredFamily& side);
// Checks a list against the family that its handle names. `count` blocks are expected.
std::optional<Rejection> validate_list(const RegisteredFamily& side, const BlockList& list, std::size_t count);
// Checks what two lists of one transfer must have in common.
std::optional<Rejection> validate_pair(const BlockList& source, const BlockList& destination);

// Which request each destination block is reserved for.
class BlockReservations {
 public:
  explicit BlockReservations(std::size_t blocks) : holders_(blocks) {}
  // Reserves all of `blocks` for `request`, or none and returns why. An index beyond the end is kIndexOutOfRange.
  std::optional<Rejection> reserve(std::uint32_t request, std::span<const std::uint32_t> blocks);
  void release(std::span<const std::uint32_t> blocks);

 private:
  std::vector<std::uint64_t> holders_;  // request + 1, 0 for none
};

}  // namespace verbatim::kv
