// The logger that plugins are given. NCCL's logger has no argument of its own, so there is one receiver a process.
#pragma once

#include <functional>
#include <string>

#include "nccl/types.h"

namespace netapi {

struct LogLine {
  nccl::DebugLogLevel level;
  unsigned long subsystems;  // bits of nccl::DebugLogSubsystem
  std::string file;          // as the plugin gave it, may be empty
  int line;
  std::string text;
};

// Called from any thread of the plugin, one line at a time; must not call set_log_callback.
using LogCallback = std::function<void(const LogLine&)>;

// Replaces the receiver of every plugin's lines; an empty one drops them.
void set_log_callback(LogCallback callback);

// An nccl::DebugLogger.
__attribute__((format(printf, 5, 6))) void log_line_of_plugin(nccl::DebugLogLevel level, unsigned long flags,
                                                              const char* file, int line, const char* format, ...);

const char* log_level_name(nccl::DebugLogLevel level);
const char* result_name(nccl::Result result);

}  // namespace netapi
