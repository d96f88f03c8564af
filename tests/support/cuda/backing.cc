#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>

#include "support/cuda/memory.h"

namespace standin {
namespace {

constexpr unsigned long long kMagic = 0x7374616e64696e01;
constexpr std::size_t kPage = 4096;

std::atomic<std::size_t> used[kMaxDevices];
std::atomic<unsigned long long> last_id;

std::size_t file_bytes(std::size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

}  // namespace

Backing::Backing(int fd, const Label& label, bool created) : fd_(fd), label_(label), created_(created), id_(++last_id) {
  if (created_) used[label_.device] += label_.bytes;
}

Backing::~Backing() {
  if (data_ != nullptr) munmap(data_, file_bytes(label_.bytes));
  close(fd_);
  if (created_) used[label_.device] -= label_.bytes;
}

std::size_t Backing::used_bytes(int device) {
  return used[device];
}

bool Backing::map() {
  struct stat status {};
  if (fstat(fd_, &status) != 0) return false;
  inode_ = status.st_ino;
  void* const data = mmap(nullptr, file_bytes(label_.bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (data == MAP_FAILED) return false;
  data_ = static_cast<std::byte*>(data);
  madvise(data, file_bytes(label_.bytes), MADV_DONTFORK);
  return true;
}

std::shared_ptr<Backing> Backing::create(int device, std::size_t bytes, unsigned handle_types) {
  if (bytes > kDeviceBytes - used[device]) return nullptr;
  const int fd = memfd_create("standin-cuda", MFD_CLOEXEC);
  if (fd < 0) return nullptr;
  const Label label{.magic = kMagic, .device = device, .handle_types = handle_types, .bytes = bytes};
  std::shared_ptr<Backing> backing(new Backing(fd, label, true));
  const auto end = static_cast<off_t>(file_bytes(bytes));
  if (ftruncate(fd, end) != 0 || pwrite(fd, &label, sizeof label, end) != sizeof label) return nullptr;
  return backing->map() ? backing : nullptr;
}

std::shared_ptr<Backing> Backing::open(const char* path) {
  struct stat status {};
  if (stat(path, &status) != 0 || !S_ISREG(status.st_mode)) return nullptr;
  const int fd = ::open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  std::shared_ptr<Backing> backing(new Backing(fd, {}, false));
  Label& label = backing->label_;
  if (fstat(fd, &status) != 0 ||
      pread(fd, &label, sizeof label, status.st_size - static_cast<off_t>(sizeof label)) != sizeof label) {
    return nullptr;
  }
  if (label.magic != kMagic || !driver().is_device(label.device)) return nullptr;
  if (file_bytes(label.bytes) + sizeof label != static_cast<std::size_t>(status.st_size)) return nullptr;
  return backing->map() ? backing : nullptr;
}

}  // namespace standin
