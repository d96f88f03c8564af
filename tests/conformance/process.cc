#include "process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>

#include "conformance.h"
#include "support/crash.h"

namespace conformance {
namespace {

int milliseconds_until(Clock::time_point end) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
  return left > 0 ? static_cast<int>(left) : 0;
}

std::vector<std::string> environment_with(const std::vector<std::pair<std::string, std::string>>& changes) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    bool changed = false;
    for (const auto& [name, value] : changes) changed = changed || text.rfind(name + "=", 0) == 0;
    if (!changed) result.push_back(text);
  }
  for (const auto& [name, value] : changes) {
    if (!value.empty()) result.push_back(name + "=" + value);
  }
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

Process::Process(const std::string& role, int api,
                 const std::vector<std::pair<std::string, std::string>>& environment) {
  int in[2];
  int out[2];
  if (pipe2(in, O_CLOEXEC) != 0) return;
  const verbatim::UniqueFd child_in(in[0]);
  to_.reset(in[1]);
  if (pipe2(out, O_CLOEXEC) != 0) return;
  const verbatim::UniqueFd child_out(out[1]);
  from_.reset(out[0]);
  std::vector<std::string> arguments = {"conformance",
                                        "--plugin",
                                        options().plugin,
                                        "--role",
                                        role,
                                        "--api",
                                        std::to_string(api),
                                        "--pause",
                                        std::to_string(options().pause.count())};
  std::vector<std::string> variables = environment_with(environment);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, child_in.get(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, child_out.get(), STDOUT_FILENO);
  const int failed =
      posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, pointers(arguments).data(), pointers(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) pid_ = -1;
  EXPECT_EQ(failed, 0) << std::strerror(failed);
}

Process::~Process() {
  if (pid_ <= 0) return;
  kill();
  waitpid(pid_, nullptr, 0);
}

bool Process::write(const void* data, std::size_t size) {
  return ::write(to_.get(), data, size) == static_cast<ssize_t>(size);
}

bool Process::read(void* data, std::size_t size) {
  const auto end = Clock::now() + kDeadline;
  std::size_t have = 0;
  while (have < size) {
    pollfd ready{.fd = from_.get(), .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, milliseconds_until(end)) <= 0) return false;
    const ssize_t got = ::read(from_.get(), static_cast<char*>(data) + have, size - have);
    if (got <= 0) return false;
    have += static_cast<std::size_t>(got);
  }
  return true;
}

void Process::kill() {
  if (pid_ > 0) ::kill(pid_, SIGKILL);
}

void Process::stop() {
  ASSERT_EQ(::kill(pid_, SIGSTOP), 0);
  siginfo_t info{};
  // kill() returns before the process has stopped.
  while (::waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WEXITED | WNOWAIT) != 0) ASSERT_EQ(errno, EINTR);
  ASSERT_EQ(info.si_code, CLD_STOPPED);
}

Exit Process::wait(Clock::duration limit) {
  const auto end = Clock::now() + limit;
  Exit result{.status = -1, .output = {}};
  for (;;) {
    pollfd ready{.fd = from_.get(), .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, milliseconds_until(end)) <= 0) return result;
    char text[4096];
    const ssize_t got = ::read(from_.get(), text, sizeof text);
    if (got <= 0) break;
    result.output.append(text, static_cast<std::size_t>(got));
  }
  int status = 0;
  if (!eventually([&] { return waitpid(pid_, &status, WNOHANG) == pid_; }, limit)) return result;
  pid_ = -1;
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  verbatim::test::report_crash(status);
  return result;
}

int run_program(int argc, char** argv,
                const std::function<void(const std::string& option, const char* value)>& handle_option) {
  ::testing::InitGoogleTest(&argc, argv);
  std::string role;
  int api = 0;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    const char* const value = argv[i + 1];
    if (option == "--plugin") {
      options().plugin = value;
    } else if (option == "--role") {
      role = value;
    } else if (option == "--api") {
      api = std::atoi(value);
    } else if (option == "--largest") {
      options().largest = std::strtoul(value, nullptr, 10);
    } else if (option == "--shorten") {
      options().shorten = std::max(1, std::atoi(value));
    } else if (option == "--pause") {
      options().pause = std::chrono::microseconds(std::atoi(value));
    } else if (handle_option) {
      handle_option(option, value);
    }
  }
  if (options().plugin.empty()) {
    std::cerr << argv[0] << ": --plugin PATH is missing\n";
    return 2;
  }
  if (!role.empty()) return run_role(role, api);
  return RUN_ALL_TESTS();
}

}  // namespace conformance
