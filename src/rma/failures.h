// Whether the communicator has failed: the first failure, which is logged, and which ends all of its contexts. Owned by
// a coll comm. Any thread: the data path, the monitor, and the thread that asks for the last error.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "base/result.h"
#include "net/diagnose/failure.h"

namespace verbatim::rma {

class Failures {
 public:
  enum Flag : std::uint32_t {
    kFailed = 0x1,
    kPeerClosed = 0x2,  // a rank has closed its communicator: nothing more can be put there
    kLanes = 0x4,       // there are several lanes to some rank: every call looks after them
  };

  // `tell`: gives the text of the first failure to the other ranks. Not one that they have found out themselves.
  enum class Origin : std::uint8_t { kHere, kOtherRank };
  explicit Failures(std::function<void(const std::string&)> tell) : tell_(std::move(tell)) {}

  // 0 while all is well: what the data path reads.
  std::uint32_t flags() const { return flags_.load(std::memory_order_acquire); }
  bool has_failed() const { return (flags() & kFailed) != 0; }
  // kNone while it has not failed.
  ErrorKind kind() const { return kind_.load(std::memory_order_relaxed); }

  // What failed, for the other ranks; empty while it has not failed, and while the thread that found it describes it.
  std::string text() const VERBATIM_EXCLUDES(mutex_);
  // The same after has_failed(), once it is described.
  std::string described() const VERBATIM_EXCLUDES(mutex_);

  void set_lanes() { flags_.fetch_or(kLanes, std::memory_order_release); }
  void set_peer_closed() { flags_.fetch_or(kPeerClosed, std::memory_order_release); }

  // Only the first failure counts. `describe` returns a Failure; it is called for the first one only.
  template <typename Describe>
  void fail(ErrorKind kind, Origin origin, Describe describe) noexcept {
    if (!begin(kind)) return;
    try {
      report(describe(), origin);
    } catch (...) {
      report_without_memory();
    }
  }

 private:
  bool begin(ErrorKind kind) noexcept;
  void report(const Failure& failure, Origin origin) VERBATIM_EXCLUDES(mutex_);
  void report_without_memory() noexcept VERBATIM_EXCLUDES(mutex_);

  const std::function<void(const std::string&)> tell_;
  mutable Mutex mutex_;
  std::string text_ VERBATIM_GUARDED_BY(mutex_);
  std::atomic<std::uint32_t> flags_{0};
  std::atomic<ErrorKind> kind_{ErrorKind::kNone};
};

}  // namespace verbatim::rma
