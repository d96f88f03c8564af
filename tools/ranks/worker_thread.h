// A thread that runs one job after another. NCCL calls a plugin from a few long-lived threads, each for certain
// functions, and the tools do the same.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

namespace verbatim::ranks {

class Worker {
 public:
  explicit Worker(const char* name) : thread_([this, name] { serve(name); }) {}
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  // Finishes the queued jobs.
  ~Worker() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  // The future carries the job's exception, if it throws one.
  std::future<void> start(std::function<void()> job) {
    std::packaged_task<void()> task(std::move(job));
    std::future<void> done = task.get_future();
    {
      std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(task));
    }
    wake_.notify_one();
    return done;
  }
  void run(std::function<void()> job) { start(std::move(job)).get(); }

 private:
  void serve(const char* name);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::packaged_task<void()>> jobs_;
  bool stop_ = false;
  std::thread thread_;  // last member: the thread uses the others
};

}  // namespace verbatim::ranks
