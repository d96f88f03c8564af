// Faults that a run introduces to check that they are found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "workload/kv/requests.h"
#include "workload/kv/validation.h"

namespace verbatim::kv {

enum class FaultKind : std::uint8_t {
  kInvalidList,       // the destination list is invalid, with one RejectionCode
  kGeometry,          // the decode side describes its family with another geometry
  kKill,              // the connection is closed in the middle of the request
  kLostNotification,  // the notification is not sent
  kDelay,             // the prefill side delays the request's data
};

struct Fault {
  FaultKind kind;
  RejectionCode code = {};  // for kInvalidList
  bool in_flight = false;   // for kInvalidList: introduced after the decode side has validated the list
  FamilyId family = FamilyId::kKv;
  std::optional<std::uint32_t> request = {};  // nothing: assign_requests chooses one
  std::uint32_t times = 1;                    // number of attempts of the request that are affected
  std::uint32_t delay_ms = 100;
};

// Parses "KIND[,family=kv|lf][,request=N][,times=N][,delay-ms=N][,at=local|peer]". KIND is the name of a rejection
// code, geometry, kill, lost-notification or delay. An invalid list without `at` gives two faults: one that the decode
// side itself finds, and one in another request that the prefill side finds. Throws std::invalid_argument.
std::vector<Fault> parse_fault(const std::string& text);

// Chooses a request for each fault without one, spread over the run. A fault with an invalid list needs a request of at
// least two blocks. Throws std::invalid_argument when there are too few requests.
void assign_requests(std::vector<Fault>& faults, const std::vector<Request>& requests, std::uint32_t kv_block_tokens,
                     std::uint32_t lf_block_tokens);

// Makes the list invalid so that it is rejected with `code`.
void corrupt_block(BlockList& list, RejectionCode code, std::size_t num_blocks);

// The faults of one family.
class Faults {
 public:
  Faults(const std::vector<Fault>& all, FamilyId family);
  // The fault of this kind for an attempt (counted from 0) of the request; null when there is none.
  const Fault* find(FaultKind kind, std::uint32_t request, std::uint32_t attempt) const;
  bool has(FaultKind kind) const;

 private:
  std::vector<Fault> own_;
};

}  // namespace verbatim::kv
