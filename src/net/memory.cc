#include "net/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/log.h"

namespace verbatim {

namespace {

// A dma-buf that the device refuses may still be reached as peer memory, at the address that it has anyway. But no
// memory to lock is none for that way either, and a file that is none is the caller's.
bool peer_memory_may_do(int dmabuf_errno) {
  return dmabuf_errno != ENOMEM && dmabuf_errno != EBADF;
}

Result<MrRef> acquire(const Device& device, const MrRequest& request) {
  if (request.type != MemoryType::kDmaBuf) return device.mr_cache().acquire(request);
  MrRequest first = request;
  first.silent_for = peer_memory_may_do;
  Result<MrRef> reference = device.mr_cache().acquire(first);
  if (reference || reference.error().kind != ErrorKind::kSystem) return reference;
  const Error refusal = reference.error();
  if (!peer_memory_may_do(refusal.sys_errno)) return reference;
  MrRequest peer = request;
  peer.type = MemoryType::kCuda;
  peer.dmabuf_errno = refusal.sys_errno;
  reference = device.mr_cache().acquire(peer);
  if (reference && device.first_fallback()) {
    VERBATIM_WARN(
        "%s: %s of GPU memory failed: %s; it is registered as peer memory at the same address, which is as good",
        device.name().c_str(), refusal.operation, std::strerror(refusal.sys_errno));
  }
  return reference;
}

}  // namespace

Result<std::unique_ptr<MemoryHandle>> register_memory(std::span<const Port* const> ports, const MrRequest& request) {
  auto handle = std::make_unique<MemoryHandle>();
  handle->device_memory = request.type != MemoryType::kHost && request.bytes != 0;
  for (std::size_t i = 0; i < ports.size(); ++i) {
    Result<MrRef> reference = acquire(*ports[i]->device, request);
    if (!reference) return reference.error();
    handle->lkey[i] = (*reference)->lkey;
    handle->rkey[i] = (*reference)->rkey;
    handle->references.push_back(std::move(*reference));
  }
  return handle;
}

MemoryHandle* Registrations::keep(std::unique_ptr<MemoryHandle> handle) {
  MemoryHandle* kept = handle.get();
  kept->keeper = this;
  const MutexLock lock(mutex_);
  kept->place = kept_.insert(kept_.end(), std::move(handle));
  return kept;
}

void Registrations::release(MemoryHandle* handle) {
  Registrations& keeper = *handle->keeper;
  std::list<std::unique_ptr<MemoryHandle>> last;  // deregistered outside the lock
  const MutexLock lock(keeper.mutex_);
  last.splice(last.end(), keeper.kept_, handle->place);
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
