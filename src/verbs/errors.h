// Converts the return conventions of verbs to Result.
#pragma once

#include <cerrno>
#include <type_traits>

#include "base/result.h"
#include "verbs/handles.h"

namespace verbatim {

// For verbs that return an object, or NULL with errno: ibv_open_device, ibv_alloc_pd, ibv_reg_mr, ibv_create_cq,
// ibv_create_qp. The handle owns the object and destroys it with `destroy`.
template <typename T>
Result<VerbsHandle<T>> adopt(const char* operation, T* object, int (*destroy)(T*), SetupStep step = SetupStep::kOther) {
  if (object == nullptr) return system_error(operation, errno, step);
  return VerbsHandle<T>(object, VerbsDeleter<T>{destroy});
}

// For verbs that return 0 or a positive errno, or (older verbs and drivers) -1 with errno or a negative errno:
// ibv_modify_qp, ibv_query_*, ibv_dereg_mr, ibv_destroy_*, ibv_post_send.
Status check_errno(const char* operation, int returned, SetupStep step = SetupStep::kOther);

// Whether the cause of a failed completion is on this host or beyond.
ErrorKind error_kind_of(ibv_wc_status status);

}  // namespace verbatim
