// Owning handles of verbs objects: unique_ptr with the destroy function of libibverbs. Declare them in dependency
// order: context, pd, mr and cq, qp.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstddef>
#include <memory>

namespace verbatim {

// Logs that a destroy call has failed. The object is leaked; usually another object still uses it (EBUSY).
void log_destroy_failure(const char* object, const char* device, int returned);

inline const char* device_name(const ibv_context* context) {
  return context != nullptr && context->device != nullptr ? context->device->name : "a device";
}
inline const char* device_name(const auto* object) {
  return device_name(object->context);
}

inline const char* kind_of(const ibv_context*) {
  return "context";
}
inline const char* kind_of(const ibv_pd*) {
  return "protection domain";
}
inline const char* kind_of(const ibv_mr*) {
  return "memory region";
}
inline const char* kind_of(const ibv_cq*) {
  return "completion queue";
}
inline const char* kind_of(const ibv_qp*) {
  return "queue pair";
}

// Tries twice, because a failure can be temporary: EBUSY while an event of the object is not acknowledged, or EINTR.
template <typename T>
int destroy_verbs_object(int (*destroy)(T*), T* object) noexcept {
  return destroy(object) == 0 ? 0 : destroy(object);
}

template <typename T>
struct VerbsDeleter {
  int (*destroy)(T*) = nullptr;

  void operator()(T* object) const noexcept {
    if (const int returned = destroy_verbs_object(destroy, object); returned != 0) {
      log_destroy_failure(kind_of(object), device_name(object), returned);
    }
  }
};

// For a QP, also decrements the device's count of QPs, which make_qp has incremented.
template <>
struct VerbsDeleter<ibv_qp> {
  int (*destroy)(ibv_qp*) = nullptr;
  std::atomic<std::size_t>* live_count = nullptr;

  void operator()(ibv_qp* qp) const noexcept {
    if (const int returned = destroy_verbs_object(destroy, qp); returned != 0) {
      return log_destroy_failure(kind_of(qp), device_name(qp), returned);
    }
    if (live_count != nullptr) live_count->fetch_sub(1, std::memory_order_relaxed);
  }
};

template <typename T>
using VerbsHandle = std::unique_ptr<T, VerbsDeleter<T>>;

using UniqueContext = VerbsHandle<ibv_context>;
using UniquePd = VerbsHandle<ibv_pd>;
using UniqueMr = VerbsHandle<ibv_mr>;
using UniqueCq = VerbsHandle<ibv_cq>;
using UniqueQp = VerbsHandle<ibv_qp>;

}  // namespace verbatim
