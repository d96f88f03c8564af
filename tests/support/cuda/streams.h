// Streams and events. A worker thread executes the operations of a stream in their order.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <random>

#include "support/cuda/driver.h"

namespace standin {

class Worker;

// Called with the lock held; may release it while it works.
using Work = std::function<CUresult(Lock& lock, Worker& worker)>;

// A CUstream points to one. The null stream and all other streams that are not non-blocking have one worker per
// context: this gives the order that the driver promises between the null stream and these.
struct Stream {
  Context* context;
  std::shared_ptr<Worker> worker;
  unsigned long long queued = 0;
  unsigned long long completed = 0;
  bool has_copied = false;  // a copy was queued in it

  bool is_idle() const { return completed == queued; }
};

// A CUevent points to one.
struct Event {
  Context* context;
  unsigned long long recorded = 0;   // number of records
  unsigned long long completed = 0;  // the last of them that the stream has reached
};

class Worker : public std::enable_shared_from_this<Worker> {
 public:
  // Null: no thread could be started. `legacy`: operations wait until no kernel runs on the GPU.
  static std::shared_ptr<Worker> start(Context& context, bool legacy);
  Worker(Context& context, bool legacy) : context_(context), legacy_(legacy), random_(std::random_device()()) {}

  Context& context() { return context_; }
  void push(std::shared_ptr<Stream> stream, Work work);
  // The thread ends when no operation is left.
  void close();
  // Numbers of operations.
  unsigned long long queued() const { return queued_; }
  unsigned long long completed() const { return completed_; }
  // A random time between 0 and twice `mean_us`. Called without the lock.
  void pause(unsigned mean_us);
  std::minstd_rand& random() { return random_; }

 private:
  struct Operation {
    std::shared_ptr<Stream> stream;
    Work work;
  };
  void run();

  Context& context_;
  const bool legacy_;
  std::minstd_rand random_;
  std::deque<Operation> queue_;
  std::condition_variable wake_;
  unsigned long long queued_ = 0;
  unsigned long long completed_ = 0;
  bool closed_ = false;
};

// The stream that a handle means; null: none.
std::shared_ptr<Stream> find_stream(Call& call, CUstream handle);
void push(const std::shared_ptr<Stream>& stream, Work work);

}  // namespace standin
