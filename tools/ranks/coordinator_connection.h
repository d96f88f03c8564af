// A rank's connection to the coordinator. When the coordinator sends an abort or closes the connection, and when the
// time of the job is over, the process exits at once, even when its other threads hang inside a plugin.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "ranks/failure.h"
#include "ranks/frame.h"

namespace verbatim::ranks {

constexpr int kDefaultTimeoutS = 300;
// More seconds than any job runs.
constexpr int kNoTimeoutS = std::numeric_limits<int>::max();

// Whether a rank prints why it ends itself, or leaves it to the coordinator, whose output is the same.
enum class Reports : std::uint8_t { kItself, kCoordinator };

class CoordinatorConnection {
 public:
  // `root` is a place of ranks/meeting_point.h. Tries until the coordinator accepts the hello, or throws Failure when
  // it does not, or when `timeout_s` has passed; with kNoTimeoutS the default one, so that a missing rank 0 is named.
  // From then on the process exits when `timeout_s` has passed since now.
  CoordinatorConnection(const std::string& root, const Hello& hello, int timeout_s, Reports reports);
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

  // The secret of the job, for connections between its ranks.
  std::uint64_t token() const { return welcome_.token; }
  // A number of the job that is no secret: the communicator ID for init. A plugin may print it.
  std::uint64_t comm_id() const { return welcome_.comm_id; }

  // An address of this host at which the other ranks can connect; its port is 0. Throws Failure.
  sockaddr_storage own_address() const;

  // Reports that this rank is done. After that the coordinator may close the connection.
  void finish();
  // Reports to the coordinator why this rank fails, and ends the process.
  [[noreturn]] void fail(ExitStatus status, const std::string& why);

 private:
  bool join(const Hello& hello);
  void listen();
  void handle(const Frame& frame);
  [[noreturn]] void time_out();
  void report(const std::string& why) const;

  const std::string root_;
  const std::string name_;  // "rank 1"
  const int timeout_s_;
  std::uint64_t deadline_ns_;
  const Reports reports_;
  UniqueFd socket_;
  FrameReader reader_;
  Welcome welcome_{};
  std::atomic<bool> failing_{false};    // fail() has reported the reason
  std::atomic<bool> gathering_{false};  // all_gather waits for other ranks
  std::mutex mutex_;
  std::condition_variable part_arrived_;
  std::optional<std::string> gathered_;
  bool leaving_ = false;
  std::thread listener_;  // last member: the thread uses the others
};

}  // namespace verbatim::ranks
