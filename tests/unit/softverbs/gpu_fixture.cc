#include "gpu_fixture.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>

#include "base/unique_fd.h"

namespace verbatim::test {
namespace {

constexpr const char* kInnerProcess = "SOFTVERBS_TEST_INNER_PROCESS";

}  // namespace

SpinningKernels::SpinningKernels(Peer* peer) : peer_(peer) {
  waits_ = cuda().standin_cuda_waits() + cuda().standin_cuda_pageable_copies();
  for (unsigned gpu = 0; gpu < gpu_count(); ++gpu) {
    cuda().standin_cuda_begin_kernel(static_cast<int>(gpu));
    if (peer_ != nullptr) peer_->standin(Peer::Standin::kBeginKernel, gpu);
  }
  if (peer_ != nullptr) peers_waits_ = peer_->standin(Peer::Standin::kWaits);
  watchdog_ = std::thread([this] {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, 20s, [this] { return is_ended_; })) return;
    ADD_FAILURE() << "a call waits for a kernel that spins";
    is_ended_ = true;
    end_own();
  });
}

void SpinningKernels::end_own() {
  for (unsigned gpu = 0; gpu < gpu_count(); ++gpu) cuda().standin_cuda_end_kernel(static_cast<int>(gpu));
}

void SpinningKernels::end() {
  if (!watchdog_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    if (!is_ended_) end_own();
    is_ended_ = true;
  }
  changed_.notify_all();
  watchdog_.join();
  if (peer_ == nullptr) return;
  for (unsigned gpu = 0; gpu < gpu_count(); ++gpu) peer_->standin(Peer::Standin::kEndKernel, gpu);
}

std::uint64_t SpinningKernels::waits() const {
  return cuda().standin_cuda_waits() + cuda().standin_cuda_pageable_copies() - waits_;
}

std::string check_in_new_process(const Variables& variables, const std::function<void()>& body) {
  if (std::getenv(kInnerProcess) != nullptr) {
    body();
    return {};
  }
  const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
  std::string name = "softverbs_gpu_test";
  std::string filter = std::string("--gtest_filter=") + test.test_suite_name() + "." + test.name();
  char* const arguments[] = {name.data(), filter.data(), nullptr};
  // All cases, where this process has those of one half.
  std::vector<std::string> environment{std::string(kInnerProcess) + "=1", "GTEST_TOTAL_SHARDS=1",
                                       "GTEST_SHARD_INDEX=0"};
  for (const auto& [variable, value] : variables) environment.push_back(variable + "=" + value);
  const auto is_replaced = [&](std::string_view entry) {
    const std::string_view variable = entry.substr(0, entry.find('=') + 1);
    for (const std::string& replacement : environment) {
      if (replacement.starts_with(variable)) return true;
    }
    return false;
  };
  std::vector<char*> pointers;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (!is_replaced(*entry)) pointers.push_back(*entry);
  }
  for (std::string& entry : environment) pointers.push_back(entry.data());
  pointers.push_back(nullptr);

  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
  const UniqueFd read_end(ends[0]);
  UniqueFd write_end(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, write_end.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, write_end.get(), STDERR_FILENO);
  pid_t child = -1;
  const int error = posix_spawn(&child, "/proc/self/exe", &actions, nullptr, arguments, pointers.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("posix_spawn");
  write_end.reset();
  std::string output;
  std::array<char, 4096> text{};
  for (ssize_t length = 0; (length = read(read_end.get(), text.data(), text.size())) > 0;) {
    output.append(text.data(), static_cast<std::size_t>(length));
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "with " << testing::PrintToString(variables) << "\n" << output;
  EXPECT_NE(output.find("1 test from 1 test suite ran"), std::string::npos) << output;
  return output;
}

}  // namespace verbatim::test
