// A progress line on stderr for long runs. Prints nothing when stderr is not a terminal.
#pragma once

#include <cstdint>
#include <string>

namespace verbatim::ranks {

class ProgressBar {
 public:
  explicit ProgressBar(bool wanted);
  ~ProgressBar() { clear(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // Draws the bar when the run has lasted two seconds and the last drawing is older than 100 ms. `done` is from 0 to 1.
  void draw(double done, const std::string& what);
  // Removes the bar. Call it before anything else is printed.
  void clear();

 private:
  const bool enabled_;
  const std::uint64_t begin_ns_;
  std::uint64_t drawn_ns_ = 0;
  bool visible_ = false;
};

// The bar's text: 30 cells, the percentage, and the elapsed and the remaining seconds.
std::string progress_text(double done, double seconds, const std::string& what);

}  // namespace verbatim::ranks
