// The ranks of one RMA communicator, each with an init of its own, for tests through the C tables: threads of this
// process, or processes.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "netapi/rma.h"

namespace rma_test {

using netapi::RmaPart;
using netapi::RmaSignal;

#define ASSERT_OK(call) ASSERT_EQ(call, nccl::Result::kSuccess)
#define EXPECT_OK(call) EXPECT_EQ(call, nccl::Result::kSuccess)

// Environment variable PLUGIN. `version` 0: the newest.
netapi::RmaPlugin& plugin(int version = 0);

class Ranks;

// One rank; its thread calls everything.
class Rank {
 public:
  Rank(Ranks& all, int number) : all_(all), number_(number) {}

  int number() const { return number_; }
  std::uint32_t next(int distance = 1) const;
  netapi::RmaPlugin& net() const;
  void barrier();
  // What a rank has listened with, for all to see.
  void* handle(int rank) const;

  // Up to listen. All have listened when it returns.
  void start();
  // Up to connect, from start if that was not called; create makes the contexts.
  void connect();
  void create(const netapi::RmaConfig& config);
  void close();

  // Collective, of host memory. nullptr after a failure.
  void* register_memory(void* data, std::size_t bytes, std::uint64_t flags = 0);

  // Started operations; nullptr after a failure, which is a failure of the test.
  void* put(int context, const RmaPart& source, std::size_t bytes, const RmaPart& target, std::uint32_t rank);
  void* put_signal(int context, const RmaPart& source, std::size_t bytes, const RmaPart& target, std::uint32_t rank,
                   const RmaSignal& signal);
  void* get(int context, const RmaPart& remote, std::size_t bytes, const RmaPart& local, std::uint32_t rank);
  // Tests until it is done.
  nccl::Result wait(void* request);
  bool wait_ok(void* request) { return request != nullptr && wait(request) == nccl::Result::kSuccess; }
  // False, which is a failure of the test: the communicator has failed.
  bool makes_progress();
  // Polls until the word has the value.
  bool wait_for(const std::uint64_t& word, std::uint64_t value);
  bool eventually(const std::function<bool()>& condition);
  bool has_error();
  // From now on the warnings of this rank's process go to its text.
  void keep_warnings();

  void* instance = nullptr;
  void* listen = nullptr;
  void* coll = nullptr;
  void* contexts = nullptr;

 private:
  Ranks& all_;
  const int number_;
};

class Ranks {
 public:
  // `version`: of the table.
  Ranks(int count, int version);

  // Runs `body` in the thread of each rank. A body that returns early with a failed check must not leave others in a
  // collective call: such a test ends by the deadline of the plugin.
  void run(const std::function<void(Rank&)>& body);
  // Runs it in a process for each rank, which has not used the plugin before. Returns the statuses as of waitpid; a
  // failed check is exit status 1.
  std::vector<int> run_processes(const std::function<void(Rank&)>& body);
  // The process of a rank, once it has begun.
  pid_t pid(int rank) const { return shared_->pids[rank]; }
  // Numbers and a text that all processes see.
  std::atomic<std::uint64_t>& number(int i) { return shared_->numbers[i]; }
  char* text(int rank) { return shared_->texts[rank]; }
  // Appends a line to the text of a rank, of which this process has only one; what does not fit is cut off.
  static void add_line(char* text, const std::string& line);

  // The same with connect, create and close around it.
  void run_connected(const netapi::RmaConfig& config, const std::function<void(Rank&)>& body);

  int count() const { return count_; }

 private:
  friend class Rank;

  static constexpr int kMaxRanks = 64;
  static constexpr std::size_t kTextBytes = 32768;
  struct Shared {
    std::atomic<std::uint32_t> arrived;
    std::atomic<std::uint32_t> rounds;
    std::atomic<std::uint64_t> numbers[kMaxRanks];
    pid_t pids[kMaxRanks];
    char handles[kMaxRanks][nccl::kNetHandleMaxBytes];
    char texts[kMaxRanks][kTextBytes];
  };
  struct Unmap {
    void operator()(Shared* shared) const;
  };

  void barrier();

  const int count_;
  netapi::RmaPlugin& plugin_;
  const std::unique_ptr<Shared, Unmap> shared_;  // also by the processes
};

// Memory of 64-bit words at the start of a page.
class Words {
 public:
  explicit Words(std::size_t count, std::uint64_t value = 0);
  std::uint64_t* data() { return words_.get(); }
  std::uint64_t& operator[](std::size_t i) { return words_[i]; }
  std::size_t bytes() const { return count_ * sizeof(std::uint64_t); }

 private:
  struct Free {
    void operator()(std::uint64_t* words) const;
  };
  std::size_t count_;
  std::unique_ptr<std::uint64_t[], Free> words_;
};

}  // namespace rma_test
