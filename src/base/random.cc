#include "base/random.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "base/log.h"

namespace verbatim {

Status fill_random(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t filled = getrandom(bytes.data(), bytes.size(), 0);
    if (filled < 0) {
      if (errno == EINTR) continue;
      const int error = errno;
      VERBATIM_WARN("getrandom failed: %s. The plugin makes no connection without it", std::strerror(error));
      return Error{ErrorKind::kSystem, error, "getrandom", true};
    }
    bytes = bytes.subspan(static_cast<std::size_t>(filled));
  }
  return {};
}

}  // namespace verbatim
