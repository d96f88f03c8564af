// What a process reads only once, such as its variables, is tested in a child of its own.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace verbatim::test {

using Variables = std::vector<std::pair<std::string, std::string>>;

struct ChildResult {
  int status = -1;          // with which it exited; -1 when it ended in another way
  std::string stderr_text;  // on stderr
};

// Runs `body` in a forked child, with these variables on top of the environment. What it returns is the exit status; an
// exception that leaves it is told on stderr, and the status is 99.
ChildResult run_in_child(const Variables& variables, const std::function<int()>& body);

// The same for a body that checks: its failures, and an exception, are failures of this test. The child ends as
// programs do. What it says on stderr is returned.
std::string check_in_child(const Variables& variables, const std::function<void()>& body);

}  // namespace verbatim::test
