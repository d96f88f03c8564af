// Collects the lines that any thread logs during the lifetime of a LogCapture.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "base/log.h"

namespace verbatim {

class LogCapture {
 public:
  LogCapture() {
    lines().clear();
    set_log_sink(add_line);
  }
  ~LogCapture() { set_log_sink(nullptr); }
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;

  std::vector<std::string> warnings() const { return of(LogLevel::kWarn); }
  std::vector<std::string> infos() const { return of(LogLevel::kInfo); }

  // The warning when there is exactly one; otherwise a text with the number of warnings.
  std::string only_warning() const {
    const std::vector<std::string> all = warnings();
    return all.size() == 1 ? all.front() : std::to_string(all.size()) + " warnings";
  }

 private:
  struct Line {
    LogLevel level;
    std::string text;
  };

  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }
  static std::vector<Line>& lines() {
    static std::vector<Line> instance;
    return instance;
  }
  static void add_line(LogLevel level, const char*, int, const char* text) {
    const std::lock_guard<std::mutex> lock(mutex());
    lines().push_back({level, text});
  }
  static std::vector<std::string> of(LogLevel level) {
    const std::lock_guard<std::mutex> lock(mutex());
    std::vector<std::string> texts;
    for (const Line& line : lines()) {
      if (line.level == level) texts.push_back(line.text);
    }
    return texts;
  }
};

}  // namespace verbatim
