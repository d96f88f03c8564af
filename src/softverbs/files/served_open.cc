#include "softverbs/files/served_open.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>

#include "softverbs/files/next.h"

namespace verbatim::softverbs {
namespace {

// A descriptor with this content.
int open_content(std::string_view content, int flags) {
  const int fd = ::memfd_create("softverbs", (flags & O_CLOEXEC) != 0 ? MFD_CLOEXEC : 0);
  if (fd < 0) return -1;
  const bool complete = ::write(fd, content.data(), content.size()) == static_cast<ssize_t>(content.size()) &&
                        ::lseek(fd, 0, SEEK_SET) == 0;
  if (complete) return fd;
  ::close(fd);
  return fail(EIO);
}

}  // namespace

int fail(int error) {
  errno = error;
  return -1;
}

// As the kernel answers for sysfs, whose files are never made or truncated by a program.
int open_served(const Path& path, int flags) {
  const bool creates = (flags & O_CREAT) != 0;
  const bool writes = (flags & O_ACCMODE) != O_RDONLY;
  if ((creates || writes) && next_access(path.get(), F_OK) != 0) return errno == ENOENT && creates ? fail(EACCES) : -1;
  if (creates && (flags & O_EXCL) != 0) return fail(EEXIST);
  flags &= ~(O_CREAT | O_EXCL | O_TRUNC);
  if (path.device_node())
    return next_openat(AT_FDCWD, "/dev/null", flags & (O_ACCMODE | O_CLOEXEC | O_NONBLOCK | O_PATH | O_DIRECTORY));
  if (writes) return fail(EACCES);
  if ((flags & O_PATH) == 0) {
    if (const std::optional<PortFile> file = FileTree::instance().read_port_file(path.get())) {
      if ((flags & O_DIRECTORY) != 0) return fail(ENOTDIR);
      return file->readable ? open_content(file->content, flags) : fail(EINVAL);
    }
  }
  const int fd = next_openat(AT_FDCWD, path.get(), flags);
  if (fd >= 0) note_directory();
  return fd;
}

int open_modules(int flags) {
  const int fd = next_openat(AT_FDCWD, "/proc/modules", flags);
  if (fd < 0 || (flags & O_ACCMODE) != O_RDONLY || (flags & O_PATH) != 0) return fd;
  std::string shown;
  std::string line;
  bool hides = false;
  char buffer[4096];
  for (ssize_t got = 0; (got = ::read(fd, buffer, sizeof buffer)) > 0;) {
    for (const char c : std::string_view(buffer, static_cast<std::size_t>(got))) {
      line += c;
      if (c != '\n') continue;
      const bool is_hidden = line.starts_with("nvidia_peermem ") || line.starts_with("nv_peer_mem ");
      hides = hides || is_hidden;
      if (!is_hidden) shown += line;
      line.clear();
    }
  }
  const int content = hides ? open_content(shown, flags) : -1;
  if (content < 0) {
    ::lseek(fd, 0, SEEK_SET);
    return fd;
  }
  ::close(fd);
  return content;
}

bool is_modules(const char* path) {
  return path != nullptr && std::strcmp(path, "/proc/modules") == 0;
}

}  // namespace verbatim::softverbs
