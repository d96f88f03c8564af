// What messages and puts share.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "nccl/types.h"
#include "netapi/log.h"
#include "simulation/scheduler.h"

namespace simulation {

// What getpid returns to the plugin: always five digits, because its lines are part of messages.
constexpr int id_of_process(std::size_t process) {
  return 10'000 + static_cast<int>(process);
}

constexpr std::size_t kMostProcesses = kMostProcessesThatDie;  // of a job
constexpr std::size_t kGuardBytes = 64;                        // between two buffers
constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kMaxBytes = 200'000;  // of a message or a put
constexpr unsigned char kUnwritten = 0xee;

// The byte at a place; the other numbers say what of.
inline unsigned char content(std::size_t a, std::size_t b, std::size_t c, std::size_t at) {
  return static_cast<unsigned char>((at * 31 + at / 253 + a * 17 + b * 101 + c) * 0x9e3779b9U >> 13);
}

// Before the run, and so not with its numbers. The same on all machines.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}

  std::size_t below(std::size_t bound) { return random_() % bound; }
  bool one_in(std::size_t count) { return below(count) == 0; }

  // Of a message or a put.
  std::size_t size() {
    switch (below(8)) {
      case 0:
        return 0;
      case 1:
        return below(kMaxBytes);
      case 2:
        return below(20'000);
      default:
        return 1 + below(2'000);
    }
  }

  template <typename T>
  void shuffle(std::vector<T>& list) {
    for (std::size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[below(i)]);
  }

 private:
  std::mt19937_64 random_;
};

// What listen fills in for the other end, or for the other ranks: in memory that the processes share.
struct Handle {
  std::atomic<bool> is_there{false};
  std::atomic<int> connected_ends{0};
  std::atomic<bool> is_given_up{false};  // an end has failed: the other one may wait for ever
  alignas(8) std::array<unsigned char, nccl::kNetHandleMaxBytes> bytes{};
};

// A call of this run has failed, as it may: another end may find it.
void note_failed_call();

// Calls of a table by the threads of one connection or rank, and what was not as it must be: a line for each.
class Calls {
 public:
  // `may_fail`: whether calls may return an error of the network or of the system now, because of a fault that the
  // plugin cannot survive.
  Calls(std::string whose, std::function<bool()> may_fail) : whose_(std::move(whose)), may_fail_(std::move(may_fail)) {}

  // A step of the simulation. False unless the call succeeds, and a problem if it may not fail. `may_be_refused`: it
  // may return that the plugin finds nothing to work with.
  template <typename Call>
  bool operator()(const char* name, Call call, bool may_be_refused = false) {
    step(name);
    const nccl::Result result = call();
    record(name, static_cast<std::int64_t>(result));
    if (result == nccl::Result::kSuccess) return true;
    const bool is_error = result == nccl::Result::kRemoteError || result == nccl::Result::kSystemError;
    const std::string line = std::string(name) + " returned " + netapi::result_name(result);
    if (result == nccl::Result::kInvalidUsage && may_be_refused) {
      has_failed_ = true;
      note_failed_call();
    } else if (is_error) {
      add_failure(line);
    } else {
      add_problem(line);
    }
    return false;
  }

  // A problem, unless calls may fail now.
  void add_failure(const std::string& line) {
    if (may_fail_()) {
      has_failed_ = true;
      note_failed_call();
    } else {
      add_problem(line);
    }
  }

  void add_problem(const std::string& line) {
    const std::lock_guard lock(mutex_);
    problems_.push_back(line + " (" + whose_ + ")");
  }

  // One that may.
  bool has_failed() const { return has_failed_; }

  // When the threads have ended.
  const std::vector<std::string>& problems() const { return problems_; }

 private:
  const std::string whose_;
  const std::function<bool()> may_fail_;
  std::atomic<bool> has_failed_{false};
  std::mutex mutex_;
  std::vector<std::string> problems_;
};

}  // namespace simulation
