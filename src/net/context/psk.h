// The key that the operator gives to all hosts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"

namespace verbatim {

// What the file of VERBATIM_PSK_FILE has: 16 to 4096 bytes, none without a path. kUsage: it cannot be used, which has
// been logged.
Result<std::vector<std::uint8_t>> read_psk(const std::string& path);

}  // namespace verbatim
