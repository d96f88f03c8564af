#include "base/unique_fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <functional>
#include <utility>

namespace verbatim {
namespace {

bool is_open(int fd) {
  return ::fcntl(fd, F_GETFD) >= 0;
}

UniqueFd open_one() {
  return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

// The result of `check` in a forked child.
bool in_child(const std::function<bool()>& check) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(check() ? 1 : 0);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  return WEXITSTATUS(status) == 1;
}

TEST(UniqueFd, Moved_ClosesOnceAtLastOwner) {
  UniqueFd first = open_one();
  const int fd = first.get();
  UniqueFd second = std::move(first);
  EXPECT_EQ(second.get(), fd);
  EXPECT_TRUE(is_open(fd));
  second = open_one();
  EXPECT_FALSE(is_open(fd));
  EXPECT_TRUE(second);
  second.reset();
  EXPECT_FALSE(second);
}

TEST(UniqueFd, AfterCloseFdsInChildren_IsClosedInForkedChild) {
  const UniqueFd early = open_one();
  static bool is_first = true;  // under --gtest_repeat, close_fds_in_children() is in effect from the second run on
  if (std::exchange(is_first, false)) {
    EXPECT_TRUE(in_child([&] { return is_open(early.get()); }));
  }
  close_fds_in_children();
  close_fds_in_children();
  UniqueFd moved = open_one();
  const UniqueFd late = std::move(moved);
  EXPECT_FALSE(in_child([&] { return is_open(early.get()) || is_open(late.get()); }));
  EXPECT_TRUE(is_open(early.get()));
  EXPECT_TRUE(is_open(late.get()));
}

TEST(UniqueFd, ForeignDescriptor_StaysOpenInForkedChild) {
  close_fds_in_children();
  const int foreign = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  EXPECT_TRUE(in_child([&] { return is_open(foreign); }));
  UniqueFd closed = open_one();
  const int number = closed.get();
  closed.reset();
  // Now a descriptor that no UniqueFd owns has this number, in this process and below in a child of the child.
  ASSERT_EQ(::dup2(foreign, number), number);
  EXPECT_TRUE(in_child([&] { return is_open(number); }));
  ::close(number);
  const UniqueFd kept = open_one();
  EXPECT_TRUE(in_child([&] {
    if (is_open(kept.get()) || ::dup2(foreign, kept.get()) != kept.get()) return false;
    return in_child([&] { return is_open(kept.get()); });
  }));
  ::close(foreign);
}

}  // namespace
}  // namespace verbatim
