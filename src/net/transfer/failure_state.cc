#include "net/transfer/failure_state.h"

#include <algorithm>
#include <new>
#include <utility>

namespace verbatim {

void FailureState::set_reason(ErrorKind kind, std::string_view why) {
  reason_kind_ = kind;
  reason_.reset(new (std::nothrow) char[why.size() + 1]);
  if (reason_ == nullptr) return;
  std::copy_n(why.begin(), why.size(), reason_.get());
  reason_[why.size()] = '\0';
}

bool FailureState::record(ErrorKind kind, const char* operation) noexcept {
  if (error() != nullptr) return false;
  error_ = {kind, 0, operation, true};
  phase_.store(Phase::kRecorded, std::memory_order_relaxed);
  set_flag(kFailed);
  return true;
}

void FailureState::record_completion(ErrorKind kind, const ibv_wc& completion, std::size_t qp,
                                     const FailedWork& work) noexcept {
  const bool flushed = completion.status == IBV_WC_WR_FLUSH_ERR;
  if (record(kind, "completion")) {
    held_ = {completion, qp, work, 0};
    phase_.store(Phase::kCompletionHeld, std::memory_order_relaxed);
  } else if (completion_held() && !flushed && held_.completion.status == IBV_WC_WR_FLUSH_ERR) {
    held_ = {completion, qp, work, held_.flushed + 1};  // the flush before was only a consequence
    error_.kind = kind;
  } else if (flushed) {
    ++held_.flushed;
  }
}

void FailureState::publish(std::unique_ptr<Failure> failure, std::string text) noexcept {
  failure_ = std::move(failure);
  text_ = std::move(text);
  phase_.store(Phase::kPublished, std::memory_order_release);
}

}  // namespace verbatim
