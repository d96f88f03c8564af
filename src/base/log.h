// Log lines of the plugin. They go to NCCL's logger after init, and to stderr (warnings only) before init and in tools.
// A warning is one line for an operator: what failed, why, "Next:" and what to do. The data path logs only failures.
#pragma once

namespace verbatim {

enum class LogLevel : unsigned char { kWarn, kInfo };

// Receives one formatted line. Called from any thread. `file` and `line` are the source position of the log call.
using LogSink = void (*)(LogLevel level, const char* file, int line, const char* text);

// Replaces the sink; nullptr restores stderr. The sink must stay callable until it is replaced.
void set_log_sink(LogSink sink);

__attribute__((format(printf, 4, 5))) void log_line(LogLevel level, const char* file, int line, const char* format,
                                                    ...);

}  // namespace verbatim

#define VERBATIM_WARN(...) ::verbatim::log_line(::verbatim::LogLevel::kWarn, __FILE__, __LINE__, __VA_ARGS__)
#define VERBATIM_INFO(...) ::verbatim::log_line(::verbatim::LogLevel::kInfo, __FILE__, __LINE__, __VA_ARGS__)
