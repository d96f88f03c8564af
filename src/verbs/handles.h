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
template <typename T>
const char* device_of(const T* object) {
  return device_name(object->context);
}
template <>
inline const char* device_of(const ibv_context* context) {
  return device_name(context);
}

template <typename T>
constexpr const char* kVerbsObjectName = "object";
template <>
inline constexpr const char* kVerbsObjectName<ibv_context> = "context";
template <>
inline constexpr const char* kVerbsObjectName<ibv_pd> = "protection domain";
template <>
inline constexpr const char* kVerbsObjectName<ibv_mr> = "memory region";
template <>
inline constexpr const char* kVerbsObjectName<ibv_cq> = "completion queue";
template <>
inline constexpr const char* kVerbsObjectName<ibv_qp> = "queue pair";

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
      log_destroy_failure(kVerbsObjectName<T>, device_of(object), returned);
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
      return log_destroy_failure(kVerbsObjectName<ibv_qp>, device_of(qp), returned);
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
