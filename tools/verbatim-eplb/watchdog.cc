#include "verbatim-eplb/watchdog.h"

#include <chrono>
#include <utility>

#include "base/clock.h"

namespace verbatim::eplb {
namespace {

constexpr std::chrono::milliseconds kInterval{100};
constexpr std::size_t kListed = 16;

}  // namespace

Watchdog::Watchdog(int limit_s, Alarm alarm)
    : limit_s_(limit_s), alarm_(std::move(alarm)), thread_([this] { watch(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_wanted_.notify_one();
  thread_.join();
}

void Watchdog::begin(std::string what, std::size_t operations, Name name) {
  const std::lock_guard lock(mutex_);
  what_ = std::move(what);
  name_ = std::move(name);
  done_.assign(operations, false);
  progress_ns_ = monotonic_ns();
}

void Watchdog::done(std::size_t operation) {
  const std::lock_guard lock(mutex_);
  done_[operation] = true;
  progress_ns_ = monotonic_ns();
}

void Watchdog::progress() {
  const std::lock_guard lock(mutex_);
  progress_ns_ = monotonic_ns();
}

void Watchdog::end() {
  const std::lock_guard lock(mutex_);
  progress_ns_ = 0;
}

void Watchdog::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_wanted_.wait_for(lock, kInterval, [this] { return stop_; })) {
    const std::uint64_t limit_ns = static_cast<std::uint64_t>(limit_s_) * kNanosecondsPerSecond;
    if (progress_ns_ == 0 || monotonic_ns() - progress_ns_ < limit_ns) continue;
    const std::string report = pending();
    progress_ns_ = 0;
    lock.unlock();
    alarm_(report);
    lock.lock();
  }
}

std::string Watchdog::pending() const {
  std::size_t count = 0;
  std::string list;
  for (std::size_t i = 0; i < done_.size(); ++i) {
    if (done_[i]) continue;
    if (count++ < kListed) list += "\n  " + name_(i);
  }
  if (count > kListed) list += "\n  and " + std::to_string(count - kListed) + " more";
  std::string text = what_ + ": no progress for " + std::to_string(limit_s_) + " s";
  if (done_.empty()) return text;
  return text + ", " + std::to_string(count) + " of " + std::to_string(done_.size()) + " operations pending:" + list;
}

}  // namespace verbatim::eplb
