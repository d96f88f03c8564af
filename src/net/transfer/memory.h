// Registered memory: the registrations that NCCL holds, with the keys of the buffer on every device of the comm, and
// the memory of the comms themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "verbs/device.h"
#include "verbs/mr_cache.h"
#include "wire/limits.h"

namespace verbatim {

// What the data path reads of a registration.
struct MemoryKeys {
  std::uint32_t lkey[wire::kMaxDevices] = {};
  std::uint32_t rkey[wire::kMaxDevices] = {};
  bool device_memory = false;  // memory of a GPU, which sees arrived data only after iflush
};

// For zero bytes NCCL need not have a registration.
inline constexpr MemoryKeys kNoMemory{};

// The registrations that NCCL holds through one context, or through one instance of RMA. NCCL does not deregister all
// of them when an operation fails; the rest end with this object. Any thread.
template <typename Handle>
class Registrations {
 public:
  // What a handle is derived from.
  struct Entry {
    Registrations* owner = nullptr;  // null for memory that NCCL does not know
    typename std::list<std::unique_ptr<Handle>>::iterator position;
  };

  Handle* add(std::unique_ptr<Handle> handle) VERBATIM_EXCLUDES(mutex_) {
    Handle* const added = handle.get();
    added->owner = this;
    const MutexLock lock(mutex_);
    added->position = handles_.insert(handles_.end(), std::move(handle));
    return added;
  }
  // What `handle` was registered through, such as a comm, may be closed already.
  static void release(Handle* handle) {
    Registrations& owner = *handle->owner;
    std::list<std::unique_ptr<Handle>> last;  // deregistered outside the lock
    const MutexLock lock(owner.mutex_);
    last.splice(last.end(), owner.handles_, handle->position);
  }

 private:
  Mutex mutex_;
  std::list<std::unique_ptr<Handle>> handles_ VERBATIM_GUARDED_BY(mutex_);
};

struct MemoryHandle : MemoryKeys, Registrations<MemoryHandle>::Entry {
  std::vector<MrRef> references;
};

// Registers on every one of `ports`, or on none.
Result<std::unique_ptr<MemoryHandle>> register_memory(std::span<const Port* const> ports, const MrRequest& request);

// Page-aligned, zeroed memory that peers write into or that work requests read from, registered on every device of a
// comm, strictly ordered because the CPU polls it.
class ControlMemory {
 public:
  static Result<ControlMemory> create(std::span<const Port* const> ports, std::size_t bytes,
                                      MrOrdering ordering = MrOrdering::kStrict);

  std::byte* data() const { return pages_.get(); }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(data()); }
  std::uint32_t lkey(std::size_t device) const { return handle_->lkey[device]; }
  std::uint32_t rkey(std::size_t device) const { return handle_->rkey[device]; }

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(std::byte* pages) const;
  };

  std::unique_ptr<std::byte, Unmap> pages_;
  std::unique_ptr<MemoryHandle> handle_;
};

}  // namespace verbatim
