// Random bytes for the secrets in NCCL's handles and for process identities.
#pragma once

#include <cstddef>
#include <span>

#include "base/result.h"

namespace verbatim {

// Fills `bytes` from getrandom. A failure is logged.
Status fill_random(std::span<std::byte> bytes);

}  // namespace verbatim
