#include "ncclapi/nccl_puts.h"

namespace verbatim::ncclapi {
namespace {

constexpr int kSymmetricWindow = 1;
// NCCL 2.30 accepts only these.
constexpr int kSignal = 0;
constexpr int kContext = 0;
constexpr unsigned kFlags = 0;

}  // namespace

NcclPuts::Functions::Functions(const std::string& library) : from(library) {
  from.find("ncclGetErrorString", error_string);
  from.find("ncclMemAlloc", allocate);
  from.find("ncclMemFree", free);
  from.find_optional("ncclCommWindowRegister", add_window);
  from.find_optional("ncclCommWindowDeregister", remove_window);
  from.find_optional("ncclPutSignal", put_signal);
  from.find_optional("ncclWaitSignal", wait_signal);
  if (add_window == nullptr || remove_window == nullptr || put_signal == nullptr || wait_signal == nullptr) {
    throw ranks::Failure(library + " has no ncclPutSignal. Next: use NCCL 2.29 or later (--nccl), or another --mode");
  }
}

std::byte* NcclPuts::allocate(std::size_t bytes) const {
  void* data = nullptr;
  check(nccl_.allocate(&data, bytes), "ncclMemAlloc");
  return static_cast<std::byte*>(data);
}

void NcclPuts::free(std::byte* data) const {
  check(nccl_.free(data), "ncclMemFree");
}

// A null window with success means that NCCL does not offer symmetric memory here.
NcclPuts::Window NcclPuts::add_window(Nccl::Comm comm, std::byte* data, std::size_t bytes) const {
  Window window = nullptr;
  check(nccl_.add_window(comm, data, bytes, &window, kSymmetricWindow), "ncclCommWindowRegister");
  if (window == nullptr) {
    throw ranks::Failure(
        "ncclCommWindowRegister returned no window. Next: NCCL_DEBUG=INFO says why there is no symmetric memory or no "
        "RMA; with Verbatim, look at VERBATIM_RMA");
  }
  return window;
}

void NcclPuts::remove_window(Nccl::Comm comm, Window window) const {
  check(nccl_.remove_window(comm, window), "ncclCommWindowDeregister");
}

void NcclPuts::put_signal(const std::byte* data, std::size_t bytes, int peer, Window window, std::size_t offset,
                          Nccl::Comm comm, memory::Gpu::Stream stream) const {
  check(nccl_.put_signal(data, bytes, kNcclUint8, peer, window, offset, kSignal, kContext, kFlags, comm, stream),
        "ncclPutSignal");
}

void NcclPuts::wait(const std::vector<Signals>& signals, Nccl::Comm comm, memory::Gpu::Stream stream) const {
  std::vector<WaitDescription> descriptions;
  for (const Signals& one : signals) descriptions.push_back({one.count, one.peer, kSignal, kContext});
  if (descriptions.empty()) return;
  check(nccl_.wait_signal(static_cast<int>(descriptions.size()), descriptions.data(), comm, stream), "ncclWaitSignal");
}

void NcclPuts::check(Result result, const char* what) const {
  if (result == kNcclSuccess || result == kNcclInProgress) return;
  throw ranks::Failure(std::string(what) + ": " + nccl_.error_string(result) +
                       ". Next: NCCL_DEBUG=INFO prints why; NCCL 2.30 needs cuMem and a net plugin with an RMA table");
}

}  // namespace verbatim::ncclapi
