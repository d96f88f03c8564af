// Notices that operations stand still, and says which.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace verbatim::eplb {

class Watchdog {
 public:
  using Alarm = std::function<void(const std::string& pending)>;

  // After `limit_s` seconds without progress `alarm` is called, once, from a thread of its own.
  Watchdog(int limit_s, Alarm alarm);
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog();

  using Name = std::function<std::string(std::size_t operation)>;

  // `what` names the group; `name` its operations, may be called until the next begin() or end().
  void begin(std::string what, std::size_t operations, Name name);
  void done(std::size_t operation);
  void progress();
  void end();  // nothing is pending

 private:
  void watch();
  std::string pending() const;  // with mutex_ held

  const int limit_s_;
  const Alarm alarm_;
  std::mutex mutex_;
  std::condition_variable stop_wanted_;
  bool stop_ = false;
  std::string what_;
  Name name_;
  std::vector<bool> done_;
  std::uint64_t moved_ns_ = 0;  // 0: nothing to watch
  std::thread thread_;          // last: uses the others
};

}  // namespace verbatim::eplb
