#include "fault_fixture.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>

#include "base/fd.h"

namespace verbatim::test {

std::string with_faults(const std::string& faults, const std::function<void()>& body) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("pipe");
  const UniqueFd read_end(ends[0]);
  UniqueFd write_end(ends[1]);
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork");
  if (child == 0) {
    dup2(write_end.get(), STDERR_FILENO);
    setenv("SOFTVERBS_FAULTS", faults.c_str(), 1);
    try {
      body();
    } catch (const std::exception& failure) {
      ADD_FAILURE() << failure.what();
    }
    std::fflush(nullptr);
    std::exit(testing::Test::HasFailure() ? EXIT_FAILURE : EXIT_SUCCESS);
  }
  write_end.reset();
  std::string told;
  std::array<char, 512> text{};
  for (ssize_t length = 0; (length = read(read_end.get(), text.data(), text.size())) > 0;) {
    told.append(text.data(), static_cast<std::size_t>(length));
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS) << "under " << faults << "\n" << told;
  return told;
}

}  // namespace verbatim::test
