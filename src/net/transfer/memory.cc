#include "net/transfer/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/log.h"

namespace verbatim {

namespace {

// Whether memory whose dma-buf the device refuses may be registered as peer memory at its address: only if the device
// has no dma-bufs. After other errors NCCL must know: its buffers of several allocations need a dma-buf.
bool has_no_dmabufs(int dmabuf_errno) {
  return dmabuf_errno == EOPNOTSUPP || dmabuf_errno == EPROTONOSUPPORT;
}

Result<MrRef> acquire(const Port& port, const MrRequest& request) {
  const Device& device = *port.device;
  MrRequest first = request;
  first.data_direct = port.data_direct && request.type == MemoryType::kDmaBuf;
  if (request.type != MemoryType::kDmaBuf || first.data_direct) return device.mr_cache().acquire(first);
  first.suppress_log_for = has_no_dmabufs;
  Result<MrRef> reference = device.mr_cache().acquire(first);
  if (reference || reference.error().kind != ErrorKind::kSystem) return reference;
  const Error refusal = reference.error();
  if (!has_no_dmabufs(refusal.sys_errno)) return reference;
  MrRequest peer = request;
  peer.type = MemoryType::kCuda;
  peer.dmabuf_errno = refusal.sys_errno;
  reference = device.mr_cache().acquire(peer);
  if (reference && device.is_first_fallback()) {
    VERBATIM_WARN(
        "%s: %s of GPU memory failed: %s; it is registered as peer memory at the same address, which works as well",
        device.name().c_str(), refusal.operation, std::strerror(refusal.sys_errno));
  }
  return reference;
}

}  // namespace

Result<std::unique_ptr<MemoryHandle>> register_memory(std::span<const Port* const> ports, const MrRequest& request) {
  auto handle = std::make_unique<MemoryHandle>();
  handle->device_memory = request.type != MemoryType::kHost && request.bytes != 0;
  for (std::size_t i = 0; i < ports.size(); ++i) {
    Result<MrRef> reference = acquire(*ports[i], request);
    if (!reference) return reference.error();
    handle->lkey[i] = (*reference)->lkey;
    handle->rkey[i] = (*reference)->rkey;
    handle->references.push_back(std::move(*reference));
  }
  return handle;
}

void ControlMemory::Unmap::operator()(std::byte* pages) const {
  ::munmap(pages, bytes);
}

Result<ControlMemory> ControlMemory::create(std::span<const Port* const> ports, std::size_t bytes,
                                            MrOrdering ordering) {
  // Pages of its own: a registration pins whole pages, and fork copies them.
  void* pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return system_error("mmap", errno);
  ControlMemory memory;
  memory.pages_ = {static_cast<std::byte*>(pages), Unmap{bytes}};
  Result<std::unique_ptr<MemoryHandle>> handle =
      register_memory(ports, {.address = pages, .bytes = bytes, .ordering = ordering});
  if (!handle) return handle.error();
  memory.handle_ = std::move(*handle);
  return memory;
}

}  // namespace verbatim
