#include "rma/failures.h"

#include <thread>

#include "base/log.h"

namespace verbatim::rma {

bool Failures::begin(ErrorKind kind) noexcept {
  ErrorKind none = ErrorKind::kNone;
  if (!kind_.compare_exchange_strong(none, kind, std::memory_order_relaxed)) return false;
  flags_.fetch_or(kFailed, std::memory_order_release);
  return true;
}

void Failures::report(const Failure& failure, Origin origin) {
  VERBATIM_WARN("%s", log_line(failure).c_str());
  const std::string text = peer_text(failure);
  {
    const MutexLock lock(mutex_);
    text_ = text;
  }
  if (origin == Origin::kHere) tell_(text);
}

std::string Failures::text() const {
  const MutexLock lock(mutex_);
  return text_;
}

std::string Failures::described() const {
  std::string known = text();
  for (; known.empty(); known = text()) std::this_thread::yield();
  return known;
}

void Failures::report_without_memory() noexcept {
  VERBATIM_WARN("a communicator of RMA failed, and there is no memory to say how");
  const MutexLock lock(mutex_);
  if (text_.empty()) text_ = "out of memory";  // as short as this it needs none
}

}  // namespace verbatim::rma
