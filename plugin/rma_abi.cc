#include "rma_abi.h"

#include "abi.h"
#include "base/log.h"
#include "exceptions.h"
#include "rma/context_posting.h"
#include "rma/instance.h"

namespace verbatim::abi {
namespace {

rma::CollComm& as_coll(void* coll_comm) {
  return *static_cast<rma::CollComm*>(coll_comm);
}

rma::ContextSet& as_contexts(void* rma_context) {
  return *static_cast<rma::ContextSet*>(rma_context);
}

rma::ContextSet::Part part(void* mhandle, std::uint64_t offset) {
  return {static_cast<const rma::Memory*>(mhandle), offset};
}

nccl::Result register_rma(void* coll_comm, MrRequest request, std::uint64_t flags, void** mhandle) {
  *mhandle = nullptr;
  // Any registered word can be the target of a signal.
  request.ordering = (flags & nccl::kMrForceStrictOrdering) != 0 ? MrOrdering::kAtomic : MrOrdering::kRelaxedAtomic;
  return store<rma::Memory>(as_coll(coll_comm).register_memory(request), mhandle);
}

}  // namespace

nccl::Result rma_init(int version, void** context, nccl::DebugLogger logger) noexcept {
  return catch_exceptions("init", [&] {
    *context = nullptr;
    first_init("RMA", version, logger);
    return store<rma::Instance>(rma::Instance::open(), context);
  });
}

nccl::Result rma_finalize(void* context) noexcept {
  return catch_exceptions("finalize", [&] {
    if (context != nullptr) rma::Instance::close(static_cast<rma::Instance*>(context));
    return nccl::Result::kSuccess;
  });
}

nccl::Result rma_devices(int* count) noexcept {
  return catch_exceptions("devices", [&] {
    const Result<std::size_t> devices = physical_device_count();
    if (!devices) return to_nccl(devices.error());
    *count = static_cast<int>(*devices);
    return nccl::Result::kSuccess;
  });
}

nccl::Result rma_listen(void* context, int device, void* handle, void** listen_comm) noexcept {
  return catch_exceptions("listen", [&] {
    *listen_comm = nullptr;
    if (context == nullptr) return nccl::Result::kInvalidUsage;
    if (device < 0) return nccl::Result::kInvalidArgument;
    rma::Instance& instance = *static_cast<rma::Instance*>(context);
    return store<rma::ListenComm>(instance.listen(static_cast<std::size_t>(device), handle_bytes(handle)), listen_comm);
  });
}

nccl::Result rma_connect(void*, void* handles[], int nranks, int rank, void* listen_comm, void** coll_comm) noexcept {
  return catch_exceptions("connect", [&] {
    *coll_comm = nullptr;
    if (listen_comm == nullptr) return nccl::Result::kInvalidArgument;
    rma::ListenComm& listen = *static_cast<rma::ListenComm*>(listen_comm);
    return store<rma::CollComm>(listen.owner->connect(listen, handles, nranks, rank), coll_comm);
  });
}

nccl::Result rma_create_context(void* coll_comm, const rma::ContextSetupRequest& request, void** rma_context) noexcept {
  return catch_exceptions("createContext", [&] {
    *rma_context = nullptr;
    return store<rma::ContextSet>(as_coll(coll_comm).create_contexts(request), rma_context);
  });
}

nccl::Result rma_reg_mr(void* coll_comm, void* data, std::size_t size, int type, std::uint64_t flags,
                        void** mhandle) noexcept {
  return catch_exceptions("regMrSym", [&] {
    if (type != nccl::kPtrHost && type != nccl::kPtrCuda) return nccl::Result::kInvalidArgument;
    const MemoryType memory = type == nccl::kPtrHost ? MemoryType::kHost : MemoryType::kCuda;
    return register_rma(coll_comm, {.address = data, .bytes = size, .type = memory}, flags, mhandle);
  });
}

nccl::Result rma_reg_mr_dmabuf(void* coll_comm, void* data, std::size_t size, int, std::uint64_t offset, int fd,
                               std::uint64_t flags, void** mhandle) noexcept {
  return catch_exceptions("regMrSymDmaBuf", [&] {
    return register_rma(
        coll_comm,
        {.address = data, .bytes = size, .type = MemoryType::kDmaBuf, .dmabuf = {.fd = fd, .offset = offset}}, flags,
        mhandle);
  });
}

nccl::Result rma_dereg_mr(void*, void* mhandle) noexcept {
  return catch_exceptions("deregMrSym", [&] {
    if (mhandle != nullptr) Registrations<rma::Memory>::release(static_cast<rma::Memory*>(mhandle));
    return nccl::Result::kSuccess;
  });
}

nccl::Result rma_destroy_context(void* rma_context) noexcept {
  return catch_exceptions("destroyContext", [&] {
    if (rma_context != nullptr) as_contexts(rma_context).owner().destroy_contexts(as_contexts(rma_context));
    return nccl::Result::kSuccess;
  });
}

nccl::Result rma_close_coll(void* coll_comm) noexcept {
  return catch_exceptions("closeColl", [&] {
    if (coll_comm != nullptr) as_coll(coll_comm).owner().close(as_coll(coll_comm));
    return nccl::Result::kSuccess;
  });
}

nccl::Result rma_close_listen(void* listen_comm) noexcept {
  return catch_exceptions("closeListen", [&] {
    if (listen_comm == nullptr) return nccl::Result::kSuccess;
    rma::ListenComm& listen = *static_cast<rma::ListenComm*>(listen_comm);
    listen.owner->close(listen);
    return nccl::Result::kSuccess;
  });
}

nccl::Result rma_iput(void* rma_context, int context, std::uint64_t source_offset, void* source_mhandle,
                      std::size_t size, std::uint64_t target_offset, void* target_mhandle, std::uint32_t rank,
                      void** request) noexcept {
  return to_nccl(as_contexts(rma_context)
                     .put(context, source_offset, static_cast<const rma::Memory*>(source_mhandle), size, target_offset,
                          static_cast<const rma::Memory*>(target_mhandle), rank, request));
}

nccl::Result rma_iput_signal(void* rma_context, int context, std::uint64_t source_offset, void* source_mhandle,
                             std::size_t size, std::uint64_t target_offset, void* target_mhandle, std::uint32_t rank,
                             std::uint64_t signal_offset, void* signal_mhandle, std::uint64_t signal_value,
                             std::uint32_t signal_operation, void** request) noexcept {
  if (signal_operation != nccl::kSignalIncrement && signal_operation != nccl::kSignalAdd) {
    *request = nullptr;
    return nccl::Result::kInvalidArgument;
  }
  const std::uint64_t value = signal_operation == nccl::kSignalIncrement ? 1 : signal_value;
  return to_nccl(as_contexts(rma_context)
                     .put_signal({context, rank}, part(source_mhandle, source_offset), size,
                                 part(target_mhandle, target_offset), {part(signal_mhandle, signal_offset), value},
                                 request));
}

nccl::Result rma_iget(void* rma_context, int context, std::uint64_t remote_offset, void* remote_mhandle,
                      std::size_t size, std::uint64_t local_offset, void* local_mhandle, std::uint32_t rank,
                      void** request) noexcept {
  return to_nccl(
      as_contexts(rma_context)
          .get({context, rank}, part(remote_mhandle, remote_offset), size, part(local_mhandle, local_offset), request));
}

nccl::Result rma_iflush(void* rma_context, int context, void* mhandle, std::uint32_t rank, void** request) noexcept {
  return to_nccl(as_contexts(rma_context).flush({context, rank}, static_cast<const rma::Memory*>(mhandle), request));
}

nccl::Result rma_test(void*, void* request, int* done) noexcept {
  return to_nccl(rma::ContextSet::test(*static_cast<rma::Request*>(request), done));
}

nccl::Result rma_progress(void* rma_context) noexcept {
  return to_nccl(as_contexts(rma_context).progress());
}

nccl::Result rma_query_last_error(void* rma_context, bool* has_error) noexcept {
  *has_error = as_contexts(rma_context).has_error();
  return nccl::Result::kSuccess;
}

}  // namespace verbatim::abi
