// A memfd in place of a dma-buf of GPU memory: softverbs accepts any file that can be mapped.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

#include "base/unique_fd.h"

namespace fault {

class DmaBuf {
 public:
  explicit DmaBuf(std::size_t bytes) : bytes_(bytes), file_(::memfd_create("dma-buf", MFD_CLOEXEC)) {
    if (::ftruncate(file_.get(), static_cast<off_t>(bytes)) != 0) return;
    pages_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  }
  ~DmaBuf() {
    if (is_mapped()) ::munmap(pages_, bytes_);
  }
  DmaBuf(const DmaBuf&) = delete;
  DmaBuf& operator=(const DmaBuf&) = delete;

  bool is_mapped() const { return pages_ != MAP_FAILED; }
  int fd() const { return file_.get(); }
  std::size_t bytes() const { return bytes_; }
  unsigned char* data() const { return static_cast<unsigned char*>(pages_); }

 private:
  const std::size_t bytes_;
  const verbatim::UniqueFd file_;
  void* pages_ = MAP_FAILED;
};

}  // namespace fault
