// Random bytes for the secrets in NCCL's handles, process identities, connections and the first PSNs of QPs.
#pragma once

#include <cstddef>
#include <span>

#include "base/result.h"

namespace verbatim {

// Fills `bytes` from getrandom. A failure is logged.
Status fill_random(std::span<std::byte> bytes);

}  // namespace verbatim
