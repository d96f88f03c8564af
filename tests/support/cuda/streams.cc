#include "support/cuda/streams.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace standin {

// Detached, and all state outlives it: exit() need not wait for the thread. It takes no signals of the process.
std::shared_ptr<Worker> Worker::start(Context& context, bool legacy) {
  auto worker = std::make_shared<Worker>(context, legacy);
  auto* const argument = new std::shared_ptr<Worker>(worker);
  sigset_t all, previous;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &previous);
  pthread_t thread;
  const int error = pthread_create(
      &thread, nullptr,
      [](void* pointer) -> void* {
        const std::unique_ptr<std::shared_ptr<Worker>> self(static_cast<std::shared_ptr<Worker>*>(pointer));
        (*self)->run();
        return nullptr;
      },
      argument);
  pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  if (error != 0) {
    delete argument;
    return nullptr;
  }
  pthread_detach(thread);
  driver().workers.insert(worker);
  return worker;
}

void Worker::push(std::shared_ptr<Stream> stream, Work work) {
  ++stream->queued;
  ++queued_;
  queue_.push_back({std::move(stream), std::move(work)});
  wake_.notify_one();
}

void Worker::close() {
  closed_ = true;
  wake_.notify_one();
}

void Worker::pause(unsigned mean_us) {
  if (mean_us > 0) usleep(std::uniform_int_distribution<unsigned>(0, 2 * mean_us)(random_));
}

void Worker::run() {
  Driver& state = driver();
  Lock lock(state.mutex);
  for (;;) {
    wake_.wait(lock, [this] { return closed_ || !queue_.empty(); });
    if (queue_.empty()) break;
    Operation operation = std::move(queue_.front());
    queue_.pop_front();
    const Device& device = state.devices[static_cast<std::size_t>(context_.device)];
    if (legacy_ && device.kernels > 0) {
      ++state.waits;
      state.changed.wait(lock, [&] { return device.kernels == 0; });
    }
    // After an error a context does nothing more.
    if (context_.error == CUDA_SUCCESS) {
      const CUresult error = operation.work(lock, *this);
      if (error != CUDA_SUCCESS && context_.error == CUDA_SUCCESS) context_.error = error;
    }
    ++operation.stream->completed;
    ++completed_;
    state.changed.notify_all();
  }
  state.workers.erase(shared_from_this());
}

std::shared_ptr<Stream> find_stream(Call& call, CUstream handle) {
  if (handle == nullptr) {
    auto& stream = call.context().null_stream;
    if (stream == nullptr) {
      auto worker = Worker::start(call.context(), true);
      if (worker == nullptr) return nullptr;
      stream = std::make_shared<Stream>(Stream{.context = &call.context(), .worker = std::move(worker)});
    }
    return stream;
  }
  const auto found = driver().streams.find(handle);
  return found == driver().streams.end() ? nullptr : found->second;
}

void push(const std::shared_ptr<Stream>& stream, Work work) {
  stream->worker->push(stream, std::move(work));
}

}  // namespace standin

using standin::Call;
using standin::driver;
using standin::Event;
using standin::find_stream;
using standin::Lock;
using standin::Stream;
using standin::Worker;

STANDIN_EXPORT CUresult cuStreamCreate(CUstream* handle, unsigned flags) {
  Call call(Call::kContext | Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  if (flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Worker> worker;
  if (flags == CU_STREAM_NON_BLOCKING) {
    worker = Worker::start(call.context(), false);
  } else if (const auto null_stream = find_stream(call, nullptr)) {
    worker = null_stream->worker;
  }
  if (worker == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  auto stream = std::make_shared<Stream>(Stream{.context = &call.context(), .worker = std::move(worker)});
  *handle = reinterpret_cast<CUstream>(stream.get());
  driver().streams[*handle] = std::move(stream);
  return CUDA_SUCCESS;
}

// Returns at once; what is queued is still executed.
STANDIN_EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
  const Call call(Call::kContext);
  if (call.error() != CUDA_SUCCESS) return call.error();
  auto& streams = driver().streams;
  const auto found = streams.find(handle);
  if (found == streams.end()) return CUDA_ERROR_INVALID_HANDLE;
  const std::shared_ptr<Stream> stream = found->second;
  streams.erase(found);
  const auto& null_stream = stream->context->null_stream;
  if (null_stream == nullptr || stream->worker != null_stream->worker) stream->worker->close();
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuStreamQuery(CUstream handle) {
  Call call(Call::kContext);
  if (call.error() != CUDA_SUCCESS) return call.error();
  const auto stream = find_stream(call, handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->context->error != CUDA_SUCCESS) return stream->context->error;
  return stream->is_idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

STANDIN_EXPORT CUresult cuStreamSynchronize(CUstream handle) {
  Call call(Call::kContext);
  if (call.error() != CUDA_SUCCESS) return call.error();
  const auto stream = find_stream(call, handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const auto last = stream->queued;
  driver().changed.wait(call.lock(), [&] { return stream->completed >= last; });
  return stream->context->error;
}

STANDIN_EXPORT CUresult cuEventCreate(CUevent* handle, unsigned) {
  Call call(Call::kContext | Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  auto event = std::make_shared<Event>(Event{.context = &call.context()});
  *handle = reinterpret_cast<CUevent>(event.get());
  driver().events[*handle] = std::move(event);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuEventDestroy_v2(CUevent handle) {
  const Call call(Call::kContext);
  if (call.error() != CUDA_SUCCESS) return call.error();
  return driver().events.erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

STANDIN_EXPORT CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  Call call(Call::kContext);
  if (call.error() != CUDA_SUCCESS) return call.error();
  const auto found = driver().events.find(handle);
  const auto stream = find_stream(call, stream_handle);
  if (found == driver().events.end() || stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const std::shared_ptr<Event> event = found->second;
  if (event->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
  if (event->context->error != CUDA_SUCCESS) return event->context->error;
  standin::push(stream, [event, record = ++event->recorded](Lock&, Worker&) {
    event->completed = std::max(event->completed, record);
    return CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}

// Needs no current context. The event means its last record; one that was never recorded has ended.
STANDIN_EXPORT CUresult cuEventQuery(CUevent handle) {
  const Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  const auto found = driver().events.find(handle);
  if (found == driver().events.end()) return CUDA_ERROR_INVALID_HANDLE;
  const Event& event = *found->second;
  if (event.context->error != CUDA_SUCCESS) return event.context->error;
  return event.completed == event.recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
