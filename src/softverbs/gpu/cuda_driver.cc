#include "softverbs/gpu/cuda_driver.h"

#include <dlfcn.h>

#include <atomic>

#include "base/mutex.h"

namespace verbatim::softverbs::cuda {
namespace {

template <typename Function>
bool find(void* library, const char* symbol, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(library, symbol));
  return function != nullptr;
}

bool find_all(void* library, Driver& driver) {
  find(library, "cuThreadExchangeStreamCaptureMode", driver.thread_exchange_capture_mode);
  return find(library, "cuPointerGetAttribute", driver.pointer_get_attribute) &&
         find(library, "cuDevicePrimaryCtxRetain", driver.primary_context_retain) &&
         find(library, "cuCtxSetCurrent", driver.context_set_current) &&
         find(library, "cuCtxPushCurrent_v2", driver.context_push) &&
         find(library, "cuCtxPopCurrent_v2", driver.context_pop) &&
         find(library, "cuStreamCreate", driver.stream_create) && find(library, "cuEventCreate", driver.event_create) &&
         find(library, "cuEventRecord", driver.event_record) && find(library, "cuEventQuery", driver.event_query) &&
         find(library, "cuMemcpyHtoDAsync_v2", driver.copy_to_device) &&
         find(library, "cuMemcpyDtoHAsync_v2", driver.copy_to_host) &&
         find(library, "cuMemcpyDtoDAsync_v2", driver.copy_on_device) &&
         find(library, "cuMemHostRegister_v2", driver.host_register) &&
         find(library, "cuDeviceCanAccessPeer", driver.device_can_access_peer) &&
         find(library, "cuCtxEnablePeerAccess", driver.context_enable_peer_access) &&
         find(library, "cuIpcGetMemHandle", driver.ipc_get_handle) &&
         find(library, "cuIpcOpenMemHandle_v2", driver.ipc_open_handle) &&
         find(library, "cuIpcCloseMemHandle", driver.ipc_close_handle) &&
         find(library, "cuMemRetainAllocationHandle", driver.memory_retain_handle) &&
         find(library, "cuMemExportToShareableHandle", driver.memory_export) &&
         find(library, "cuMemImportFromShareableHandle", driver.memory_import) &&
         find(library, "cuMemRelease", driver.memory_release) &&
         find(library, "cuMemAddressReserve", driver.address_reserve) &&
         find(library, "cuMemAddressFree", driver.address_free) && find(library, "cuMemMap", driver.memory_map) &&
         find(library, "cuMemUnmap", driver.memory_unmap) &&
         find(library, "cuMemSetAccess", driver.memory_set_access) &&
         find(library, "cuGetErrorName", driver.error_name);
}

}  // namespace

const Driver* driver() {
  static std::atomic<const Driver*> found{nullptr};
  if (const Driver* known = found.load(std::memory_order_acquire); known != nullptr) return known;
  static Mutex mutex;
  static Driver table;
  MutexLock lock(mutex);
  if (const Driver* known = found.load(std::memory_order_relaxed); known != nullptr) return known;
  // The reference that dlopen takes is kept: the engine must not outlive the library's code.
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr || !find_all(library, table)) return nullptr;
  found.store(&table, std::memory_order_release);
  return &table;
}

const char* name_of(const Driver& driver, Status status) {
  const char* name = nullptr;
  return driver.error_name(status, &name) == kSuccess && name != nullptr ? name : "an unknown CUDA error";
}

}  // namespace verbatim::softverbs::cuda
