// UniqueFd closes its file descriptor when it is destroyed, and on request also in every child that the process forks.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace verbatim {

// After this call, a forked child closes its copies of all UniqueFds of this library at once. Otherwise a child that
// lives longer than this process would keep its connections open, and peers would not notice that this process has
// ended: FD_CLOEXEC helps only if the child calls exec. The child must not use the plugin. A descriptor that another
// thread opens during fork() can stay open in the child. Descriptors of the application are never closed.
void close_fds_in_children();

// The set of descriptors that are owned by UniqueFds: a bit set, because a forked child must not allocate memory.
class OpenFds {
 public:
  static void add(int fd) {
    if (Word* const word = word_of(fd)) word->fetch_or(bit_of(fd), kOrder);
  }
  // False: the descriptor is no longer in the set, because a forked child has closed it in close_all.
  static bool remove(int fd) {
    Word* const word = word_of(fd);
    return word == nullptr || (word->fetch_and(~bit_of(fd), kOrder) & bit_of(fd)) != 0;
  }
  static void close_all();

 private:
  static constexpr std::memory_order kOrder = std::memory_order_relaxed;
  static constexpr unsigned kWordBits = 64;
  static constexpr std::size_t kMaxFds = std::size_t{1} << 20;  // the kernel's default limit (fs.nr_open)

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
