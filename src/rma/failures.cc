#include "rma/failures.h"

#include "base/log.h"

namespace verbatim::rma {

bool Failures::begin(ErrorKind kind) noexcept {
  ErrorKind none = ErrorKind::kNone;
  if (!kind_.compare_exchange_strong(none, kind, std::memory_order_relaxed)) return false;
  flags_.fetch_or(kFailed, std::memory_order_release);
  return true;
}

void Failures::report(const Failure& failure) {
  VERBATIM_WARN("%s", log_line(failure).c_str());
  tell_(peer_text(failure));
}

void Failures::report_without_memory() noexcept {
  VERBATIM_WARN("a communicator of RMA failed, and there is no memory to say how");
}

}  // namespace verbatim::rma
