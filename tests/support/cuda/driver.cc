#include "support/cuda/driver.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "support/cuda/memory.h"
#include "support/cuda/streams.h"

namespace standin {
namespace {

std::atomic<bool> forked_child;

// The contexts of a thread; the last is current. The real driver has such a stack too. Without destructors, because a
// thread may call the driver while it ends. In the static TLS block: the sanitizers of clang 14 misread dynamic blocks.
constexpr int kStackSize = 32;
[[gnu::tls_model("initial-exec")]] thread_local Context* context_stack[kStackSize];
[[gnu::tls_model("initial-exec")]] thread_local int context_count;

unsigned setting(const char* name, unsigned default_value) {
  const char* const text = std::getenv(name);
  return text == nullptr || *text == '\0' ? default_value : static_cast<unsigned>(std::strtoul(text, nullptr, 10));
}

Context* current_context() {
  return context_count == 0 ? nullptr : context_stack[context_count - 1];
}

}  // namespace

Driver& driver() {
  static Driver& instance = *new Driver;
  return instance;
}

bool is_forked_child() {
  return forked_child.load(std::memory_order_relaxed);
}

Driver::Driver() : memory(std::make_unique<Memory>()) {}

bool Driver::kernel_runs() const {
  return std::any_of(devices.begin(), devices.end(), [](const Device& device) { return device.kernels > 0; });
}

void Driver::wait_for_kernels(Lock& lock) {
  if (!kernel_runs()) return;
  ++waits;
  changed.wait(lock, [this] { return !kernel_runs(); });
}

void Driver::drain(Lock& lock) {
  std::vector<std::pair<std::shared_ptr<Worker>, unsigned long long>> queued;
  for (const auto& worker : workers) queued.emplace_back(worker, worker->queued());
  for (const auto& [worker, last] : queued) {
    changed.wait(lock, [&worker = worker, last = last] { return worker->completed() >= last; });
  }
}

void Driver::destroy_primary_context(int device) {
  Context* const context = std::exchange(devices[static_cast<std::size_t>(device)].primary, nullptr);
  devices[static_cast<std::size_t>(device)].retained = 0;
  if (context == nullptr) return;
  context->error = CUDA_ERROR_CONTEXT_IS_DESTROYED;
  memory->forget(*context);
  for (const auto& worker : workers) {
    if (&worker->context() == context) worker->close();
  }
  changed.notify_all();
}

Call::Call(unsigned needs) {
  if (is_forked_child()) {
    error_ = CUDA_ERROR_NOT_INITIALIZED;
    return;
  }
  Driver& state = driver();
  lock_ = Lock(state.mutex);
  if (!state.initialized) {
    error_ = CUDA_ERROR_NOT_INITIALIZED;
    return;
  }
  if ((needs & kNoKernel) != 0) state.wait_for_kernels(lock_);
  context_ = current_context();
  if ((needs & kContext) == 0) return;
  error_ = context_ == nullptr ? CUDA_ERROR_INVALID_CONTEXT : context_->error;
}

}  // namespace standin

using standin::Call;
using standin::Context;
using standin::Device;
using standin::driver;
using standin::Driver;
using standin::Lock;

STANDIN_EXPORT CUresult cuInit(unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  // A context does not survive fork: all calls of the child fail, also cuInit.
  if (standin::is_forked_child()) return CUDA_ERROR_NOT_INITIALIZED;
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (state.initialized) return CUDA_SUCCESS;
  const unsigned gpus = std::min<unsigned>(standin::setting("STANDIN_CUDA_GPUS", 2), standin::kMaxDevices);
  if (gpus == 0) return CUDA_ERROR_NO_DEVICE;
  state.devices.resize(gpus);
  state.peer_access = standin::setting("STANDIN_CUDA_PEER", 1) != 0;
  state.delay_us = standin::setting("STANDIN_CUDA_DELAY_US", state.delay_us);
  if (!state.memory->reserve()) return CUDA_ERROR_OUT_OF_MEMORY;
  pthread_atfork(nullptr, nullptr, [] { standin::forked_child = true; });
  state.initialized = true;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  // To make a context may wait for kernels; to retain one that exists does not.
  Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  Driver& state = driver();
  if (!state.is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  Device& owner = state.devices[static_cast<std::size_t>(device)];
  if (owner.primary == nullptr) {
    state.wait_for_kernels(call.lock());
    if (owner.primary == nullptr) state.contexts.insert(owner.primary = new Context(device));
  }
  ++owner.retained;
  *context = reinterpret_cast<CUcontext>(owner.primary);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  Driver& state = driver();
  if (!state.is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  Device& owner = state.devices[static_cast<std::size_t>(device)];
  if (owner.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--owner.retained > 0) return CUDA_SUCCESS;
  state.wait_for_kernels(call.lock());
  state.drain(call.lock());
  if (owner.retained == 0) state.destroy_primary_context(device);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  const Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  if (!driver().is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = driver().devices[static_cast<std::size_t>(device)].primary != nullptr;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  const Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  auto* const chosen = reinterpret_cast<Context*>(context);
  if (chosen == nullptr) {
    if (standin::context_count > 0) --standin::context_count;
    return CUDA_SUCCESS;
  }
  if (driver().contexts.count(chosen) == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (chosen->error == CUDA_ERROR_CONTEXT_IS_DESTROYED) return chosen->error;
  if (standin::context_count == 0) standin::context_count = 1;
  standin::context_stack[standin::context_count - 1] = chosen;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  const Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  *context = reinterpret_cast<CUcontext>(standin::current_context());
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
  const Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  auto* const chosen = reinterpret_cast<Context*>(context);
  if (driver().contexts.count(chosen) == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (chosen->error == CUDA_ERROR_CONTEXT_IS_DESTROYED) return chosen->error;
  if (standin::context_count == standin::kStackSize) return CUDA_ERROR_INVALID_VALUE;
  standin::context_stack[standin::context_count++] = chosen;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  const Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  if (standin::context_count == 0) return CUDA_ERROR_INVALID_CONTEXT;
  Context* const popped = standin::context_stack[--standin::context_count];
  if (context != nullptr) *context = reinterpret_cast<CUcontext>(popped);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  Call call(Call::kContext | Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  auto* const owner = reinterpret_cast<Context*>(peer);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (driver().contexts.count(owner) == 0 || owner == &call.context()) return CUDA_ERROR_INVALID_CONTEXT;
  if (owner->error != CUDA_SUCCESS) return owner->error;
  if (!driver().can_access_peer(call.context().device, owner->device)) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  const bool is_new = call.context().peers.insert(owner->device).second;
  return is_new ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

STANDIN_EXPORT CUresult cuCtxSynchronize() {
  Call call(Call::kContext | Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  driver().drain(call.lock());
  return call.context().error;
}
