// A file descriptor that closes itself; also, when asked for, in every child that the process forks.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace verbatim {

// From now on a child that the application forks closes its copies of all UniqueFds of this library at once. Else a
// child that outlives this process would keep its connections open, and no peer would notice its death: FD_CLOEXEC
// helps only where the child executes something. Nothing else of ours may be used in the child. A descriptor that is
// opened in the very moment of the fork may stay open there; what is not ours is never closed.
void close_fds_in_children();

// The descriptors of all UniqueFds: one bit for each, as nothing may be allocated between fork and exec.
class OpenFds {
 public:
  static void add(int fd) {
    if (Word* const word = word_of(fd)) word->fetch_or(bit_of(fd), kOrder);
  }
  // False: it is not ours any more, as in a child that has closed it.
  static bool remove(int fd) {
    Word* const word = word_of(fd);
    return word == nullptr || (word->fetch_and(~bit_of(fd), kOrder) & bit_of(fd)) != 0;
  }
  static void close_all();

 private:
  static constexpr std::memory_order kOrder = std::memory_order_relaxed;
  static constexpr unsigned kWordBits = 64;
  static constexpr std::size_t kMaxFds = std::size_t{1} << 20;  // the system's own limit (fs.nr_open), unless raised

  using Word = std::atomic<std::uint64_t>;

  static Word* word_of(int fd) {
    const auto number = static_cast<unsigned>(fd);
    return number < kMaxFds ? &words[number / kWordBits] : nullptr;
  }
  static std::uint64_t bit_of(int fd) { return std::uint64_t{1} << (static_cast<unsigned>(fd) % kWordBits); }

  inline static std::array<Word, kMaxFds / kWordBits> words{};
};

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) { reset(fd); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this == &other) return *this;
    reset();
    fd_ = std::exchange(other.fd_, -1);
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() {
    if (fd_ >= 0) OpenFds::remove(fd_);
    return std::exchange(fd_, -1);
  }
  void reset(int fd = -1) {
    if (fd_ >= 0 && OpenFds::remove(fd_)) ::close(fd_);
    fd_ = fd;
    if (fd_ >= 0) OpenFds::add(fd_);
  }

 private:
  int fd_ = -1;
};

}  // namespace verbatim
