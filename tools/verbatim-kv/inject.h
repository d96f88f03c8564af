// Faults that a run makes on purpose, to see that they are found.
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
  kInvalidList,       // one of RefusalCode, in the destination list
  kGeometry,          // the decode side introduces itself with another geometry
  kKill,              // the connection goes away in the middle of the request
  kLostNotification,  // the notification is never sent
  kDelay,             // the request waits at the sender
};

struct Fault {
  FaultKind kind;
  RejectionCode code = {};  // of kInvalidList
  bool in_flight = false;   // kInvalidList: after the decode side has checked the list itself
  FamilyId family = FamilyId::kKv;
  std::optional<std::uint32_t> request = {};  // none: assign_requests chooses
  std::uint32_t times = 1;                    // tries of the request that it happens to
  std::uint32_t delay_ms = 100;
};

// "KIND[,family=kv|lf][,request=N][,times=N][,delay-ms=N][,at=local|peer]", where KIND is a refusal's name, geometry,
// kill, lost-notification or delay. An invalid list without `at` is two faults: found by the decode side itself in one
// request, by the prefill side in another. Throws std::invalid_argument.
std::vector<Fault> parse_fault(const std::string& text);

// Gives each fault without a request one of its own, spread over the run; a list is made invalid only if it has two
// blocks. Throws std::invalid_argument when there are too few requests.
void assign_requests(std::vector<Fault>& faults, const std::vector<Request>& requests, std::uint32_t kv_block_tokens,
                     std::uint32_t lf_block_tokens);

// The list with something wrong in it.
void corrupt_block(BlockList& list, RejectionCode code, std::size_t num_blocks);

// The faults of one family.
class Faults {
 public:
  Faults(const std::vector<Fault>& all, FamilyId family);
  // Of this kind, for the `attempt`-th try (from 0) of the request; null when there is none.
  const Fault* find(FaultKind kind, std::uint32_t request, std::uint32_t attempt) const;
  bool has(FaultKind kind) const;

 private:
  std::vector<Fault> own_;
};

}  // namespace verbatim::kv
