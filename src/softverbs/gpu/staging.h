// Pinned buffers that all processes of the registry share. Copies of GPU memory pass through them where the GPU cannot
// reach the other end: host memory, and memory of another process, which then copies between the buffer and its GPU.
#pragma once

#include <cstdint>
#include <utility>

#include "base/result.h"
#include "softverbs/host/host_registry.h"
#include "softverbs/host/process_view.h"

namespace verbatim::softverbs {

// Called when the process registers GPU memory, before the region is published: the buffers get memory and are pinned,
// and the thread that copies for peers is started. Has no effect after the first success.
Status prepare_staging(const HostRegistry& registry, Segment& segment);
void forget_staging_of_parent();

// A buffer, taken by this process. The destructor returns it.
class TakenBuffer {
 public:
  TakenBuffer() = default;
  TakenBuffer(TakenBuffer&& other) noexcept
      : registry_(std::exchange(other.registry_, nullptr)), index_(other.index_), serial_(other.serial_) {}
  TakenBuffer& operator=(TakenBuffer&& other) noexcept {
    std::swap(registry_, other.registry_);
    std::swap(index_, other.index_);
    std::swap(serial_, other.serial_);
    return *this;
  }
  ~TakenBuffer();

  explicit operator bool() const { return registry_ != nullptr; }
  std::byte* bytes() const { return registry_->staging_bytes(index_); }

  // `owner`: the process that will be asked to copy; 0: none. `is_waited_for`: a thread does nothing until the copy has
  // ended. Empty: all buffers are in use now, or all but those that are kept for copies that are waited for, or all
  // that one owner may have: it may be stopped, and the others need some.
  static TakenBuffer take(const HostRegistry& registry, Incarnation owner, bool is_waited_for);

  // Asks the process that owns the GPU memory at `address` to copy. False: its queue is full, call again later.
  bool request_copy(const ProcessView& owner, std::uint64_t address, std::uint32_t bytes, bool is_read,
                    std::uint32_t lane);
  enum class Progress { kRunning, kDone, kFailed, kOwnerDead };
  Progress poll(const ProcessView& owner) const;

 private:
  StagingBuffer& shared() const { return registry_->gpu_staging().buffers[index_]; }

  const HostRegistry* registry_ = nullptr;
  std::uint32_t index_ = 0;
  std::uint32_t serial_ = 0;
};

// For the owner of GPU memory: returns when every request for a copy that was queued before this call has ended.
void await_requested_copies(Segment& segment);

}  // namespace verbatim::softverbs
