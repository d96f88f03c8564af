// Detects that operations make no progress, and lists the pending ones.
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

  // When there was no progress for `limit_s` seconds, calls `alarm` once, from a thread of its own.
  Watchdog(int limit_s, Alarm alarm);
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog();

  using Name = std::function<std::string(std::size_t operation)>;

  // `what` names the group. `name` gives the text of an operation; it may be called until the next begin() or end().
  void begin(std::string what, std::size_t operations, Name name);
  void done(std::size_t operation);
  void progress();
  void end();  // no operation is pending

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
  std::uint64_t progress_ns_ = 0;  // time of the last progress; 0: not watching
  std::thread thread_;             // last member: the thread uses the others
};

}  // namespace verbatim::eplb
