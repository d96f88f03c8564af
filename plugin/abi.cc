#include "abi.h"

#include <atomic>
#include <cerrno>
#include <memory>
#include <utility>

#include "base/log.h"
#include "base/unique_fd.h"
#include "base/version.h"
#include "exceptions.h"
#include "exit.h"
#include "net/transfer/recv_comm.h"
#include "net/transfer/send_comm.h"
#include "profiler.h"

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

Context& context_of(const ListenComm& listen) {
  return *static_cast<Context*>(listen.settings().comm.owner);
}

nccl::Result register_memory(void* comm, const MrRequest& request, void** mhandle) {
  *mhandle = nullptr;
  Result<std::unique_ptr<MemoryHandle>> registered = as_comm(comm)->register_memory(request);
  if (!registered) return to_nccl(registered.error());
  *mhandle = as_comm(comm)->settings().registrations->add(std::move(*registered));
  return nccl::Result::kSuccess;
}

Mutex g_process_context_mutex;  // held while init makes the context of the process

}  // namespace

void first_init(const char* table, int version, nccl::DebugLogger logger) {
  g_logger.store(logger, std::memory_order_release);
  set_log_sink(logger != nullptr ? log_to_nccl : nullptr);
  register_exit_handler();
  close_fds_in_children();
  static std::atomic<bool> has_begun{false};
  if (!has_begun.exchange(true)) {
    VERBATIM_INFO("Verbatim %s loaded, %s plugin API v%d", release_and_commit().c_str(), table, version);
  }
}

nccl::Result init(int version, void** context, int traffic_class, nccl::DebugLogger logger,
                  nccl::ProfilerCallback profiler) noexcept {
  return catch_exceptions("init", [&] {
    *context = nullptr;
    first_init("net", version, logger);
    return store<Context>(open_context(traffic_class, profiler_of(profiler)), context);
  });
}

nccl::Result finalize(void* context) noexcept {
  return catch_exceptions("finalize", [&] {
    if (context != nullptr) close_context(static_cast<Context*>(context));
    return nccl::Result::kSuccess;
  });
}

nccl::Result init_process(int version, nccl::DebugLogger logger, nccl::ProfilerCallback profiler) noexcept {
  return catch_exceptions("init", [&] {
    first_init("net", version, logger);
    const MutexLock lock(g_process_context_mutex);
    if (g_process_context.load() != nullptr) return nccl::Result::kSuccess;
    Result<Config> config = Config::from_environment();
    if (!config) return to_nccl(config.error());
    // NCCL before v10 does not map GPU memory for Data Direct; before v9 it has no forceFlush.
    if (version < 10) config->data_direct = DataDirect::kOff;
    Result<Context*> opened = open_context(*std::move(config), nccl::kNetTrafficClassUndefined, profiler_of(profiler));
    if (!opened) return to_nccl(opened.error());
    (*opened)->set_process_wide();
    g_process_context.store(*opened);
    return nccl::Result::kSuccess;
  });
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

nccl::Result merge_devices(int* device, const int* members, int count, std::size_t max) noexcept {
  return catch_exceptions("makeVDevice", [&] {
    const Result<std::size_t> merged = verbatim::merge_devices(members, count, max);
    if (!merged) return to_nccl(merged.error());
    *device = static_cast<int>(*merged);
    return nccl::Result::kSuccess;
  });
}

nccl::Result listen(void* context, int device, void* handle, void** listen_comm) noexcept {
  return catch_exceptions("listen", [&] {
    *listen_comm = nullptr;
    if (context == nullptr) return nccl::Result::kInvalidUsage;
    if (device < 0) return nccl::Result::kInvalidArgument;
    return store<ListenComm>(
        static_cast<Context*>(context)->listen(static_cast<std::size_t>(device), handle_bytes(handle)), listen_comm);
  });
}

nccl::Result connect(void* context, int device, int traffic_class, void* handle, void** send_comm) noexcept {
  return catch_exceptions("connect", [&] {
    *send_comm = nullptr;
    if (context == nullptr) return nccl::Result::kInvalidUsage;
    if (device < 0) return nccl::Result::kInvalidArgument;
    return store<Comm>(
        static_cast<Context*>(context)->connect(static_cast<std::size_t>(device), handle_bytes(handle), traffic_class),
        send_comm);
  });
}

nccl::Result accept(void* listen_comm, void** recv_comm) noexcept {
  return catch_exceptions("accept", [&] {
    *recv_comm = nullptr;
    ListenComm& listen = *static_cast<ListenComm*>(listen_comm);
    return store<Comm>(context_of(listen).accept(listen), recv_comm);
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
    if (mhandle != nullptr) Registrations<MemoryHandle>::release(static_cast<MemoryHandle*>(mhandle));
    return nccl::Result::kSuccess;
  });
}

nccl::Result isend(void* send_comm, void* data, std::size_t size, int tag, void* mhandle, void* profiler_handle,
                   void** request) noexcept {
  return to_nccl(static_cast<SendComm*>(as_comm(send_comm))
                     ->isend(data, size, tag, static_cast<const MemoryHandle*>(mhandle), profiler_handle, request));
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
    *request = comm.iflush(read_address, *memory);
    if (*request != nullptr || comm.error() == nullptr) return nccl::Result::kSuccess;
    return to_nccl(*comm.error());
  });
}

namespace {

// By RequestKind. A table costs fewer instructions than a switch.
using Test = ErrorKind (*)(Request& request, int* done, int* sizes) noexcept;
constexpr Test kTests[] = {
    SendComm::test,          RecvComm::test,       RecvComm::test_atomic,       RecvComm::test_flush,
    SendComm::test_timed,    RecvComm::test_timed, RecvComm::test_timed_atomic, SendComm::test_profiled,
    RecvComm::test_profiled,
};
static_assert(std::size(kTests) == static_cast<std::size_t>(RequestKind::kProfiledRecv) + 1);

}  // namespace

nccl::Result test(void* opaque, int* done, int* sizes) noexcept {
  Request& request = *static_cast<Request*>(opaque);
  return to_nccl(kTests[static_cast<std::size_t>(request.kind)](request, done, sizes));
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
