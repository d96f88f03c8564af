#include "base/random.h"

#include <sys/random.h>

#include <cerrno>

namespace verbatim {

Status fill_random(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t filled = getrandom(bytes.data(), bytes.size(), 0);
    if (filled < 0) {
      if (errno == EINTR) continue;
      return system_error("getrandom", errno);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(filled));
  }
  return {};
}

}  // namespace verbatim
