#include "net/context/psk.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/log.h"
#include "base/unique_fd.h"

namespace verbatim {

// Without O_NONBLOCK a FIFO would block.
Result<std::vector<std::uint8_t>> read_psk(const std::string& path) {
  constexpr std::size_t kMinBytes = 16;
  constexpr std::size_t kMaxBytes = 4096;
  std::vector<std::uint8_t> psk;
  if (path.empty()) return psk;
  psk.resize(kMaxBytes + 1);
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  bool is_read = file && ::fstat(file.get(), &status) == 0;
  if (is_read && !S_ISREG(status.st_mode)) {
    is_read = false;
    errno = EINVAL;
  }
  std::size_t bytes = 0;
  for (ssize_t count = 1; is_read && count > 0 && bytes < psk.size(); bytes += static_cast<std::size_t>(count)) {
    count = TEMP_FAILURE_RETRY(::read(file.get(), psk.data() + bytes, psk.size() - bytes));
    is_read = count >= 0;
    count = std::max<ssize_t>(count, 0);
  }
  if (!is_read) {
    const int error = errno;
    VERBATIM_WARN("%s cannot be read: %s. Next: correct VERBATIM_PSK_FILE", path.c_str(), std::strerror(error));
    return Error{ErrorKind::kUsage, error, "VERBATIM_PSK_FILE", true};
  }
  psk.resize(bytes);
  if (bytes >= kMinBytes && bytes <= kMaxBytes) return psk;
  VERBATIM_WARN("%s has %s than %zu bytes. Next: correct VERBATIM_PSK_FILE", path.c_str(),
                bytes < kMinBytes ? "less" : "more", bytes < kMinBytes ? kMinBytes : kMaxBytes);
  return Error{ErrorKind::kUsage, 0, "VERBATIM_PSK_FILE", true};
}

}  // namespace verbatim
