// Unpredictable bytes, for secrets that a peer must present.
#pragma once

#include <cstddef>
#include <span>

#include "base/result.h"

namespace verbatim {

// Fills all of `bytes` from the kernel's generator.
Status fill_random(std::span<std::byte> bytes);

}  // namespace verbatim
