#include "verbs/errors.h"

#include <cstring>

#include "base/log.h"
#include "verbs/handles.h"

namespace verbatim {
namespace {

int errno_of(int returned) {
  if (returned > 0) return returned;
  return returned == -1 ? errno : -returned;
}

}  // namespace

Status check_errno(const char* operation, int returned, SetupStep step) {
  if (returned == 0) return {};
  return system_error(operation, errno_of(returned), step);
}

void log_destroy_failure(const char* object, const char* device, int returned) {
  VERBATIM_WARN("cannot destroy a %s of %s: %s. The object is leaked", object, device,
                std::strerror(errno_of(returned)));
}

ErrorKind error_kind_of(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_QP_OP_ERR:
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
    case IBV_WC_FATAL_ERR:
    case IBV_WC_GENERAL_ERR:
      return ErrorKind::kSystem;
    default:
      return ErrorKind::kRemote;
  }
}

}  // namespace verbatim
