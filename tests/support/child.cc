#include "support/child.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iterator>
#include <stdexcept>

#include "base/unique_fd.h"
#include "support/crash.h"
#include "support/wait.h"

namespace verbatim::test {

namespace {

std::ptrdiff_t count_threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

// QEMU has one of its own, which ends with the program.
const std::ptrdiff_t kThreadsAtStart = count_threads();

// A lock that another thread holds at the fork stays locked in the child. With AddressSanitizer that may be a lock of
// its allocator, for which a thread that starts and LeakSanitizer at the exit then wait for ever.
void require_no_other_thread() {
  if (kHasThreadSanitizer) return;  // it has a thread of its own, and takes its locks before a fork
  // A joined thread stays there for a moment.
  for (Wait patience(kPatience); count_threads() > kThreadsAtStart; usleep(1000)) {
    if (patience.is_over()) throw std::logic_error("a test must not fork beside other threads");
  }
}

}  // namespace

ChildResult run_in_child(const Variables& variables, const std::function<int()>& body) {
  require_no_other_thread();
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("pipe");
  const UniqueFd read_end(ends[0]);
  UniqueFd write_end(ends[1]);
  std::fflush(nullptr);  // otherwise the child would print the buffered output again
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork");
  if (child == 0) {
    dup2(write_end.get(), STDERR_FILENO);
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    try {
      _exit(body());
    } catch (const std::exception& failure) {
      std::fprintf(stderr, "%s\n", failure.what());
      _exit(99);
    }
  }
  write_end.reset();
  ChildResult result;
  std::array<char, 512> text{};
  for (ssize_t length = 0; (length = read(read_end.get(), text.data(), text.size())) > 0;) {
    result.stderr_text.append(text.data(), static_cast<std::size_t>(length));
  }
  int status = 0;
  if (waitpid(child, &status, 0) == child && WIFEXITED(status)) result.status = WEXITSTATUS(status);
  report_crash(status);
  return result;
}

std::string check_in_child(const Variables& variables, const std::function<void()>& body) {
  const ChildResult result = run_in_child(variables, [&]() -> int {
    try {
      body();
    } catch (const std::exception& failure) {
      ADD_FAILURE() << failure.what();
    }
    std::fflush(nullptr);
    std::exit(testing::Test::HasFailure() ? EXIT_FAILURE : EXIT_SUCCESS);
  });
  EXPECT_EQ(result.status, EXIT_SUCCESS) << "with " << testing::PrintToString(variables) << "\n" << result.stderr_text;
  return result.stderr_text;
}

}  // namespace verbatim::test
