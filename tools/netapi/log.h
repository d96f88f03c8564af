// The logger that is passed to plugins. NCCL's logger type has no context argument, so there is one callback per
// process.
#pragma once

#include <functional>
#include <string>

#include "nccl/types.h"

namespace netapi {

struct LogLine {
  nccl::DebugLogLevel level;
  unsigned long subsystems;  // bits of nccl::DebugLogSubsystem
  std::string file;          // as the plugin passed it; may be empty
  int line;
  std::string text;
};

// Called from any thread of the plugin, for one line at a time. It must not call set_log_callback.
using LogCallback = std::function<void(const LogLine&)>;

// Sets the callback for the lines of all plugins. An empty callback drops the lines.
void set_log_callback(LogCallback callback);

// Whether lines are formatted (the default), or LogLine::text is the format. A plugin that passes arguments which do
// not match its format would end this process.
void set_line_formatting(bool on);

// The nccl::DebugLogger that is passed to the plugin's init.
__attribute__((format(printf, 5, 6))) void log_line_of_plugin(nccl::DebugLogLevel level, unsigned long flags,
                                                              const char* file, int line, const char* format, ...);

const char* log_level_name(nccl::DebugLogLevel level);
const char* result_name(nccl::Result result);

}  // namespace netapi
