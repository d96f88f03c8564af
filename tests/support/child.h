// Runs test code in a forked child, for state that a process reads only once, such as environment variables.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace verbatim::test {

using Variables = std::vector<std::pair<std::string, std::string>>;

struct ChildResult {
  int status = -1;  // exit status; -1 when the child did not exit by itself
  std::string stderr_text;
};

// Runs `body` in a forked child with these variables added to the environment. The return value of `body` is the exit
// status. Throws std::logic_error where this process has other threads (not with ThreadSanitizer). An exception that
// leaves `body` is printed on stderr, and the status is 99.
ChildResult run_in_child(const Variables& variables, const std::function<int()>& body);

// The same for a body with gtest checks: failed checks and exceptions in the child are failures of this test. The child
// ends with std::exit, so its exit handlers run. Returns the child's stderr.
std::string check_in_child(const Variables& variables, const std::function<void()>& body);

}  // namespace verbatim::test
