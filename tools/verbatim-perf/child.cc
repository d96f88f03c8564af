#include "verbatim-perf/child.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "ranks/failure.h"

namespace verbatim::perf {

namespace fs = std::filesystem;

void run_process(const std::vector<std::string>& arguments, const std::vector<std::string>& variables,
                 const fs::path& log) {
  const pid_t child = ::fork();
  if (child < 0) throw ranks::Failure("fork: " + std::string(std::strerror(errno)));
  if (child == 0) {
    const int out = ::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (out >= 0) {
      ::dup2(out, STDOUT_FILENO);
      ::dup2(out, STDERR_FILENO);
    }
    for (const std::string& variable : variables) ::putenv(const_cast<char*>(variable.c_str()));
    std::vector<char*> raw;
    for (const std::string& argument : arguments) raw.push_back(const_cast<char*>(argument.c_str()));
    raw.push_back(nullptr);
    ::execvp(raw[0], raw.data());
    std::perror(raw[0]);
    ::_exit(127);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
  std::ifstream file(log);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
    throw ranks::Failure("cannot start " + arguments[0] + ". Next: install it, or measure without it (--help)");
  }
  throw ranks::Failure("a measuring process failed:\n" + text);
}

}  // namespace verbatim::perf
