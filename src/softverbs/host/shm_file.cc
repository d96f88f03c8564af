#include "softverbs/host/shm_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/log.h"

namespace verbatim::softverbs {

Result<UniqueFd> open_shm(const std::string& path, OpenMode mode) {
  int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW;
  if (mode != OpenMode::kExisting) flags |= O_CREAT;
  if (mode == OpenMode::kCreateNew) flags |= O_EXCL;
  UniqueFd fd(::open(path.c_str(), flags, S_IRUSR | S_IWUSR));
  if (!fd) {
    const int error = errno;
    if (mode != OpenMode::kExisting) {
      VERBATIM_WARN("%s cannot be created: %s", path.c_str(), std::strerror(error));
    }
    return system_error("open", error);
  }
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return system_error("fstat", errno);
  if (info.st_uid != ::geteuid() || (info.st_mode & (S_IRWXG | S_IRWXO)) != 0 || !S_ISREG(info.st_mode)) {
    VERBATIM_WARN("%s is refused: it is not a private file of user %u. Next: remove it, or set SOFTVERBS_NAMESPACE",
                  path.c_str(), ::geteuid());
    return system_error("open", EACCES);
  }
  return fd;
}

bool is_backed(const UniqueFd& fd) {
  struct stat info {};
  return ::fstat(fd.get(), &info) == 0 && info.st_blocks != 0;
}

Result<Mapping> map_shm(const UniqueFd& fd, std::size_t bytes) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
  if (address == MAP_FAILED) return system_error("mmap", errno);
  ::madvise(address, bytes, MADV_DONTDUMP);
  return Mapping(address, bytes);
}

Status back_with_memory(const UniqueFd& fd, std::size_t offset, std::size_t bytes) {
  const int error = ::posix_fallocate(fd.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes));
  if (error == ENOSPC)
    VERBATIM_WARN(
        "memory cannot be allocated: /dev/shm (or SOFTVERBS_DIRECTORY) is full. Next: enlarge it, or use fewer or "
        "smaller queues");
  if (error != 0) return system_error("posix_fallocate", error);
  return {};
}

}  // namespace verbatim::softverbs
