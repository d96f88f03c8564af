// A rank's TCP connection to the coordinator. When the coordinator sends an abort or closes the connection, the process
// exits at once, even when its other threads hang inside a plugin.
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
  // `root` is HOST:PORT. Retries until `timeout_s` has passed, then throws Failure.
  CoordinatorConnection(const std::string& root, const Hello& hello, int timeout_s);
  CoordinatorConnection(const CoordinatorConnection&) = delete;
  CoordinatorConnection& operator=(const CoordinatorConnection&) = delete;
  ~CoordinatorConnection();

  // Sends this rank's part and waits for the parts of all ranks. Returns them in the order of the ranks.
  std::vector<std::string> all_gather(const std::string& part);
  // The same for a trivially copyable value.
  template <typename T>
  std::vector<T> all_gather_values(const T& own) {
    std::vector<T> values;
    for (const std::string& bytes : all_gather(to_bytes(own))) values.push_back(from_bytes<T>(bytes));
    return values;
  }
  void barrier() { all_gather({}); }

  // Reports that this rank is done. After that the coordinator may close the connection.
  void finish();
  // Reports to the coordinator why this rank fails, and ends the process.
  [[noreturn]] void fail(ExitStatus status, const std::string& why);

 private:
  void listen();

  UniqueFd socket_;
  std::mutex mutex_;
  std::condition_variable part_arrived_;
  std::optional<std::string> gathered_;
  bool leaving_ = false;
  std::thread listener_;  // last member: the thread uses the others
};

}  // namespace verbatim::ranks
