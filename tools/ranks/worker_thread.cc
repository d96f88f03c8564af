#include "ranks/worker_thread.h"

#include <pthread.h>

namespace verbatim::ranks {

void Worker::serve(const char* name) {
  pthread_setname_np(pthread_self(), name);
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    std::packaged_task<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    lock.lock();
  }
}

}  // namespace verbatim::ranks
