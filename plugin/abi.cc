#include "abi.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <new>
#include <utility>

#include "base/log.h"
#include "base/unique_fd.h"
#include "net/transfer/recv_comm.h"
#include "net/transfer/send_comm.h"

namespace __gnu_cxx {
void __freeres();  // of libsupc++, which declares it in no header
}

namespace verbatim::abi {
namespace {

std::atomic<nccl::DebugLogger> g_logger{nullptr};

void log_to_nccl(LogLevel level, const char* file, int line, const char* text) {
  const nccl::DebugLogger logger = g_logger.load(std::memory_order_acquire);
  if (logger == nullptr) return;
  const bool warn = level == LogLevel::kWarn;
  logger(warn ? nccl::DebugLogLevel::kWarn : nccl::DebugLogLevel::kInfo, nccl::kLogInit | nccl::kLogNet, file, line,
         "NET/Verbatim : %s", text);
}

void set_logger(nccl::DebugLogger logger) {
  g_logger.store(logger, std::memory_order_release);
  set_log_sink(logger != nullptr ? log_to_nccl : nullptr);
}

nccl::Result to_nccl(const Error& error) {
  return abi::to_nccl(error.kind);
}

// No exception may leave the plugin. The only expected exception is std::bad_alloc.
template <typename Call>
nccl::Result catch_exceptions(const char* name, Call&& call) noexcept {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    VERBATIM_WARN("%s failed: out of memory", name);
    return nccl::Result::kSystemError;
  } catch (...) {
    VERBATIM_WARN("%s failed: unexpected C++ exception", name);
    return nccl::Result::kInternalError;
  }
}

Context& context_of(const ListenComm& listen) {
  return *static_cast<Context*>(listen.settings().comm.owner);
}

// A null request without an error is success too: NCCL calls again.
nccl::Result request_result(const Comm& comm, const Request* request) {
  if (request != nullptr || comm.error() == nullptr) return nccl::Result::kSuccess;
  return to_nccl(*comm.error());
}

std::span<std::uint8_t, wire::kHandleBytes> handle_bytes(void* handle) {
  static_assert(wire::kHandleBytes == nccl::kNetHandleMaxBytes);
  return std::span<std::uint8_t, wire::kHandleBytes>(static_cast<std::uint8_t*>(handle), wire::kHandleBytes);
}

nccl::Result register_memory(void* comm, const MrRequest& request, void** mhandle) {
  *mhandle = nullptr;
  Result<std::unique_ptr<MemoryHandle>> registered = as_comm(comm)->register_memory(request);
  if (!registered) return to_nccl(registered.error());
  *mhandle = as_comm(comm)->settings().registrations->add(std::move(*registered));
  return nccl::Result::kSuccess;
}

std::atomic<Context*> g_process_context{nullptr};
Mutex g_process_context_mutex;

// exit() runs its handlers, one of which sets g_process_exiting, before the destructors of libraries. dlclose() runs
// only the destructor.
std::atomic<bool> g_process_exiting{false};
std::atomic<bool> g_unloading{false};
std::atomic<pid_t> g_loading_pid{0};  // of the process that called init: a forked child must not close its contexts

extern "C" int __cxa_atexit(void (*handler)(void*), void* argument, void* library);
extern "C" void __cxa_finalize(void* library);

// After this, handlers and destructors of the application run while its threads can still call the plugin. One of them
// can call dlclose. RTLD_NODELETE keeps the plugin's code mapped for the other threads.
void record_exit(void*) {
  if (g_unloading.load()) return;
  g_process_exiting.store(true);
  Dl_info plugin{};
  if (::dladdr(&g_process_exiting, &plugin) != 0) ::dlopen(plugin.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

void register_exit_handler() {
  if (g_loading_pid.exchange(::getpid()) == ::getpid()) return;
  // &g_process_exiting takes the place of this library's __dso_handle: so dlclose() does not run the handler with the
  // library's destructors, and __cxa_finalize(&g_process_exiting) can remove the handler alone.
  __cxa_atexit(record_exit, nullptr, &g_process_exiting);
}

// Common to all init functions. The first init after loading logs the version of the table, because NCCL has just
// logged the versions that it did not find in the plugin.
void first_init(int version, nccl::DebugLogger logger) {
  set_logger(logger);
  register_exit_handler();
  close_fds_in_children();
  static std::atomic<bool> has_begun{false};
  if (!has_begun.exchange(true)) VERBATIM_INFO("Verbatim %s loaded, net plugin API v%d", VERBATIM_VERSION, version);
}

// Up to v10 there is no finalize: unloading the library closes the context of the process and what NCCL has left open.
// It also closes contexts of later versions that were not finalized, because the monitor's thread must not run code
// that is unloaded. When the process exits with open comms, other threads can still use them, so nothing is closed.
__attribute__((destructor)) void close_process_context() {
  const bool exits = g_process_exiting.load();
  g_unloading.store(true);
  __cxa_finalize(&g_process_exiting);  // removes the exit handler, whose code is about to be unloaded
  const pid_t owner = g_loading_pid.load();
  if (owner != 0 && owner != ::getpid()) return;
  Context* context = g_process_context.load();
  if (!exits) {
    g_process_context.store(nullptr);
    close_all_contexts();
  } else if (context != nullptr && context->idle()) {
    g_process_context.store(nullptr);
    close_context(context);
  }
#ifdef VERBATIM_OWNS_CXX_RUNTIME
  // The plugin's own copy of the C++ runtime reserves 72 KiB for exceptions when memory is exhausted. Without this call
  // each load of the plugin would leak them.
  if (!exits) __gnu_cxx::__freeres();
#endif
}

}  // namespace

nccl::Result init(int version, void** context, int traffic_class, nccl::DebugLogger logger) noexcept {
  return catch_exceptions("init", [&] {
    *context = nullptr;
    first_init(version, logger);
    Result<Context*> opened = open_context(traffic_class);
    if (!opened) return to_nccl(opened.error());
    *context = *opened;
    return nccl::Result::kSuccess;
  });
}

nccl::Result finalize(void* context) noexcept {
  return catch_exceptions("finalize", [&] {
    if (context != nullptr) close_context(static_cast<Context*>(context));
    return nccl::Result::kSuccess;
  });
}

nccl::Result init_process(int version, nccl::DebugLogger logger) noexcept {
  return catch_exceptions("init", [&] {
    first_init(version, logger);
    const MutexLock lock(g_process_context_mutex);
    if (g_process_context.load() != nullptr) return nccl::Result::kSuccess;
    Result<Context*> opened = open_context(nccl::kNetTrafficClassUndefined);
    if (!opened) return to_nccl(opened.error());
    (*opened)->set_process_wide();
    g_process_context.store(*opened);
    return nccl::Result::kSuccess;
  });
}

void* process_context() noexcept {
  return g_process_context.load();
}

nccl::Result announce(void* context, const Announcement& announcement) noexcept {
  return catch_exceptions("setNetAttr", [&] {
    if (context == nullptr) return nccl::Result::kInvalidUsage;
    static_cast<Context*>(context)->announce(announcement);
    return nccl::Result::kSuccess;
  });
}

nccl::Result devices(int* count) noexcept {
  return catch_exceptions("devices", [&] {
    const Result<std::size_t> devices = device_count();
    if (!devices) return to_nccl(devices.error());
    *count = static_cast<int>(*devices);
    return nccl::Result::kSuccess;
  });
}

nccl::Result device_properties(int index, DeviceProperties& properties) noexcept {
  return catch_exceptions("getProperties", [&] {
    if (index < 0) return nccl::Result::kInvalidArgument;
    const Result<DeviceProperties> found = device(static_cast<std::size_t>(index));
    if (!found) return to_nccl(found.error());
    properties = *found;
    return nccl::Result::kSuccess;
  });
}

nccl::Result listen(void* context, int device, void* handle, void** listen_comm) noexcept {
  return catch_exceptions("listen", [&] {
    *listen_comm = nullptr;
    if (context == nullptr) return nccl::Result::kInvalidUsage;
    if (device < 0) return nccl::Result::kInvalidArgument;
    Result<ListenComm*> made =
        static_cast<Context*>(context)->listen(static_cast<std::size_t>(device), handle_bytes(handle));
    if (!made) return to_nccl(made.error());
    *listen_comm = *made;
    return nccl::Result::kSuccess;
  });
}

nccl::Result connect(void* context, int device, int traffic_class, void* handle, void** send_comm) noexcept {
  return catch_exceptions("connect", [&] {
    *send_comm = nullptr;
    if (context == nullptr) return nccl::Result::kInvalidUsage;
    if (device < 0) return nccl::Result::kInvalidArgument;
    Result<SendComm*> made =
        static_cast<Context*>(context)->connect(static_cast<std::size_t>(device), handle_bytes(handle), traffic_class);
    if (!made) return to_nccl(made.error());
    *send_comm = static_cast<Comm*>(*made);
    return nccl::Result::kSuccess;
  });
}

nccl::Result accept(void* listen_comm, void** recv_comm) noexcept {
  return catch_exceptions("accept", [&] {
    *recv_comm = nullptr;
    ListenComm& listen = *static_cast<ListenComm*>(listen_comm);
    Result<RecvComm*> made = context_of(listen).accept(listen);
    if (!made) return to_nccl(made.error());
    *recv_comm = static_cast<Comm*>(*made);
    return nccl::Result::kSuccess;
  });
}

nccl::Result reg_mr(void* comm, void* data, std::size_t size, int type, void** mhandle) noexcept {
  return catch_exceptions("regMr", [&] {
    if (type != nccl::kPtrHost && type != nccl::kPtrCuda) return nccl::Result::kInvalidArgument;
    const MemoryType memory = type == nccl::kPtrHost ? MemoryType::kHost : MemoryType::kCuda;
    return register_memory(comm, {.address = data, .bytes = size, .type = memory}, mhandle);
  });
}

nccl::Result reg_mr_dmabuf(void* comm, void* data, std::size_t size, int type, std::uint64_t offset, int fd,
                           void** mhandle) noexcept {
  return catch_exceptions("regMrDmaBuf", [&] {
    // `type` is the type of the memory in the dma-buf: NCCL passes NCCL_PTR_CUDA, other callers pass NCCL_PTR_DMABUF.
    if (type != nccl::kPtrHost && type != nccl::kPtrCuda && type != nccl::kPtrDmaBuf) {
      return nccl::Result::kInvalidArgument;
    }
    return register_memory(
        comm, {.address = data, .bytes = size, .type = MemoryType::kDmaBuf, .dmabuf = {.fd = fd, .offset = offset}},
        mhandle);
  });
}

nccl::Result dereg_mr(void*, void* mhandle) noexcept {
  return catch_exceptions("deregMr", [&] {
    if (mhandle != nullptr) Registrations::release(static_cast<MemoryHandle*>(mhandle));
    return nccl::Result::kSuccess;
  });
}

nccl::Result isend(void* send_comm, void* data, std::size_t size, int tag, void* mhandle, void** request) noexcept {
  const MemoryKeys* memory = static_cast<const MemoryHandle*>(mhandle);
  if (memory == nullptr) {
    *request = nullptr;
    if (size != 0) return nccl::Result::kInvalidArgument;
    memory = &kNoMemory;
  }
  return to_nccl(static_cast<SendComm*>(as_comm(send_comm))->isend(data, size, tag, *memory, request));
}

nccl::Result iflush(void* recv_comm, int n, void** data, int* sizes, void** mhandles, void** request) noexcept {
  return catch_exceptions("iflush", [&] {
    RecvComm& comm = *static_cast<RecvComm*>(as_comm(recv_comm));
    *request = nullptr;
    // One READ from any buffer flushes all data that arrived before it. So it does not matter that NCCL's `sizes` can
    // have another order than `data` when some members are done earlier than others.
    const MemoryHandle* memory = nullptr;
    const void* read_address = nullptr;
    bool any_data = false;
    for (int i = 0; i < n; ++i) {
      any_data = any_data || sizes[i] > 0;
      const auto* handle = static_cast<const MemoryHandle*>(mhandles[i]);
      if (handle == nullptr || !handle->device_memory) continue;
      memory = handle;
      read_address = data[i];
    }
    if (!any_data || memory == nullptr) return nccl::Result::kSuccess;
    Request* made = comm.iflush(read_address, *memory);
    *request = made;
    return request_result(comm, made);
  });
}

nccl::Result test(void* opaque, int* done, int* sizes) noexcept {
  Request& request = *static_cast<Request*>(opaque);
  switch (request.kind) {
    case RequestKind::kSend:
      return to_nccl(SendComm::test(request, done, sizes));
    case RequestKind::kRecv:
      return to_nccl(RecvComm::test(request, done, sizes));
    case RequestKind::kRecvAtomic:
      return to_nccl(RecvComm::test_atomic(request, done, sizes));
    case RequestKind::kFlush:
      break;
  }
  return to_nccl(RecvComm::test_flush(request, done));
}

nccl::Result close_comm(void* opaque) noexcept {
  return catch_exceptions("close", [&] {
    if (opaque == nullptr) return nccl::Result::kSuccess;
    Comm& comm = *as_comm(opaque);
    static_cast<Context*>(comm.settings().owner)->close(comm);
    return nccl::Result::kSuccess;
  });
}

nccl::Result close_listen(void* opaque) noexcept {
  return catch_exceptions("closeListen", [&] {
    if (opaque == nullptr) return nccl::Result::kSuccess;
    ListenComm& listen = *static_cast<ListenComm*>(opaque);
    context_of(listen).close(listen);
    return nccl::Result::kSuccess;
  });
}

}  // namespace verbatim::abi
