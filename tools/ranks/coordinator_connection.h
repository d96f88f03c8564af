// A rank's line to the meeting point. When the meeting point says stop, or is gone, the process ends at once, wherever
// its other threads are: inside a plugin that hangs, for instance.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "ranks/failure.h"
#include "ranks/frame.h"

namespace verbatim::ranks {

class CoordinatorConnection {
 public:
  // Connects to HOST:PORT, trying again until `timeout_s` has passed. Throws Failure.
  CoordinatorConnection(const std::string& root, const Hello& hello, int timeout_s);
  CoordinatorConnection(const CoordinatorConnection&) = delete;
  CoordinatorConnection& operator=(const CoordinatorConnection&) = delete;
  ~CoordinatorConnection();

  // Gives this rank's part and waits for those of all ranks, in their order.
  std::vector<std::string> all_gather(const std::string& part);
  // The same for a plain value.
  template <typename T>
  std::vector<T> all_gather_values(const T& own) {
    std::vector<T> values;
    for (const std::string& bytes : all_gather(to_bytes(own))) values.push_back(from_bytes<T>(bytes));
    return values;
  }
  void barrier() { all_gather({}); }

  void finish();
  // Tells the others why this rank gives up, and ends the process.
  [[noreturn]] void fail(ExitStatus status, const std::string& why);

 private:
  void listen();

  UniqueFd socket_;
  std::mutex mutex_;
  std::condition_variable answered_;
  std::optional<std::string> answer_;
  bool leaving_ = false;
  std::thread listener_;  // last: uses the others
};

}  // namespace verbatim::ranks
