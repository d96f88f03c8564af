#include "ranks/progress_bar.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "base/clock.h"

namespace verbatim::ranks {
namespace {

constexpr std::uint64_t kQuietNs = 2 * kNanosecondsPerSecond;
constexpr std::uint64_t kRedrawNs = 100 * kNanosecondsPerMillisecond;
constexpr std::size_t kCells = 30;

}  // namespace

ProgressBar::ProgressBar(bool wanted) : enabled_(wanted && isatty(STDERR_FILENO) == 1), begin_ns_(monotonic_ns()) {}

void ProgressBar::draw(double done, const std::string& what) {
  if (!enabled_) return;
  const std::uint64_t now = monotonic_ns();
  if (now - begin_ns_ < kQuietNs || now - drawn_ns_ < kRedrawNs) return;
  drawn_ns_ = now;
  visible_ = true;
  const double seconds = static_cast<double>(now - begin_ns_) / static_cast<double>(kNanosecondsPerSecond);
  std::fprintf(stderr, "\r\033[K%s", progress_text(done, seconds, what).c_str());
  std::fflush(stderr);
}

void ProgressBar::clear() {
  if (!visible_) return;
  visible_ = false;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
}

std::string progress_text(double done, double seconds, const std::string& what) {
  const double part = std::clamp(done, 0.0, 1.0);
  const auto full = static_cast<std::size_t>(part * static_cast<double>(kCells));
  char numbers[64];
  if (part > 0) {
    std::snprintf(numbers, sizeof numbers, " %3.0f %%  %.0f s, %.0f s to go  ", 100 * part, seconds,
                  seconds / part - seconds);
  } else {
    std::snprintf(numbers, sizeof numbers, "   0 %%  %.0f s  ", seconds);
  }
  std::string text(kCells + 2, '.');
  text.front() = '[';
  text.back() = ']';
  std::fill_n(text.begin() + 1, full, '#');
  return text.append(numbers).append(what);
}

}  // namespace verbatim::ranks
