// A line on stderr that tells how far a long run is; nothing when stderr is no terminal.
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

  // Redraws when the run has lasted some seconds and the last drawing is not fresh. `done` is from 0 to 1.
  void draw(double done, const std::string& what);
  // Before anything else is printed.
  void clear();

 private:
  const bool enabled_;
  const std::uint64_t begin_ns_;
  std::uint64_t drawn_ns_ = 0;
  bool visible_ = false;
};

// The bar's text: 30 cells, percent, seconds so far and to go.
std::string progress_text(double done, double seconds, const std::string& what);

}  // namespace verbatim::ranks
