#include "base/log.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>

namespace verbatim {
namespace {

// NCCL's logger truncates a line to 1,024 bytes.
constexpr std::size_t kMaxLineBytes = 1024;

void write_to_stderr(LogLevel level, const char*, int, const char* text) {
  if (level == LogLevel::kWarn) std::fprintf(stderr, "verbatim: %s\n", text);
}

std::atomic<LogSink> g_sink{write_to_stderr};

}  // namespace

void set_log_sink(LogSink sink) {
  g_sink.store(sink != nullptr ? sink : write_to_stderr, std::memory_order_release);
}

void log_line(LogLevel level, const char* file, int line, const char* format, ...) {
  char text[kMaxLineBytes];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  // The text can contain values of settings and text from a peer. A control character there must not split the line.
  for (char* c = text; *c != '\0'; ++c) {
    if (static_cast<unsigned char>(*c) < ' ' || *c == '\x7f') *c = '?';
  }
  g_sink.load(std::memory_order_acquire)(level, file, line, text);
}

}  // namespace verbatim
