#include "perf_run.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "support/crash.h"

namespace verbatim::perf {

PerfProcess::PerfProcess(const std::vector<std::string>& arguments, const Environment& environment,
                         const char* program) {
  const std::string path = setting(program);
  std::vector<char*> argv{const_cast<char*>(path.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return;
  pid_ = fork();
  if (pid_ == 0) {
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    for (const std::string& entry : environment) putenv(const_cast<char*>(entry.c_str()));
    execv(argv[0], argv.data());
    _exit(127);
  }
  close(ends[1]);
  output_ = fdopen(ends[0], "r");
}

PerfProcess::~PerfProcess() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  if (output_ != nullptr) std::fclose(output_);
}

std::string PerfProcess::wait_for_line(const std::string& text) {
  char line[4096];
  while (output_ != nullptr && std::fgets(line, sizeof line, output_) != nullptr) {
    read_ += line;
    if (std::string(line).find(text) != std::string::npos) return line;
  }
  return {};
}

Outcome PerfProcess::finish() {
  char line[4096];
  while (output_ != nullptr && std::fgets(line, sizeof line, output_) != nullptr) read_ += line;
  int status = 0;
  if (pid_ > 0) waitpid(pid_, &status, 0);
  verbatim::test::report_crash(status);
  pid_ = -1;
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_};
}

std::string setting(const char* name) {
  const char* const value = std::getenv(name);
  EXPECT_NE(nullptr, value) << name << " is not set: run this test through meson";
  return value == nullptr ? "" : value;
}

std::uint16_t free_port() {
  constexpr unsigned kFirst = 12'000;
  constexpr unsigned kPorts = 16'000;
  static unsigned next = static_cast<unsigned>(::getpid()) * 31;
  for (unsigned attempt = 0; attempt < kPorts; ++attempt) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(kFirst + next++ % kPorts));
    const bool free = ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    ::close(fd);
    if (free) return ntohs(address.sin_port);
  }
  return 0;
}

}  // namespace verbatim::perf
