// Files in /dev/shm that belong to this user alone, and their mappings.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "base/result.h"
#include "base/unique_fd.h"

namespace verbatim::softverbs {

// Owns a shared mapping.
class Mapping {
 public:
  Mapping() = default;
  Mapping(void* address, std::size_t bytes) : address_(address), bytes_(bytes) {}
  Mapping(Mapping&& other) noexcept : address_(std::exchange(other.address_, nullptr)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();

  template <typename T>
  T* as() const {
    return static_cast<T*>(address_);
  }

 private:
  void* address_ = nullptr;
  std::size_t bytes_ = 0;
};

enum class OpenMode { kExisting, kCreateOrOpen, kCreateNew };

// Fails with EACCES, and says so on stderr, when the file belongs to somebody else or is open to others.
Result<UniqueFd> open_shm(const std::string& name, OpenMode mode);

// Whether memory lies under any of it yet.
bool is_backed(const UniqueFd& fd);

Result<Mapping> map_shm(const UniqueFd& fd, std::size_t bytes);

// Backs a range with memory now, as a page that cannot be had later is a SIGBUS.
Status back_with_memory(const UniqueFd& fd, std::size_t offset, std::size_t bytes);

}  // namespace verbatim::softverbs
