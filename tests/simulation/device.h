// What softverbs' inline engine begins and ends at a time, and what it sends later, it does at the next call of a verb.
// A real port does not wait for that: while this object exists, a thread of the process polls a completion queue of its
// own.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

struct ibv_context;
struct ibv_cq;

namespace simulation {

class DeviceClock {
 public:
  DeviceClock();
  ~DeviceClock();
  DeviceClock(const DeviceClock&) = delete;
  DeviceClock& operator=(const DeviceClock&) = delete;

 private:
  void run();

  ibv_context* context_ = nullptr;
  ibv_cq* cq_ = nullptr;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace simulation
