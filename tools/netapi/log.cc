#include "netapi/log.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <utility>

#include "base/mutex.h"

namespace netapi {
namespace {

constexpr std::size_t kMaxLineBytes = 1024;  // NCCL cuts lines at the same length

std::atomic<bool> g_formats{true};

struct Receiver {
  verbatim::Mutex mutex;
  LogCallback callback VERBATIM_GUARDED_BY(mutex);
};

// Never destroyed: a plugin may log while the process exits.
Receiver& receiver() {
  static Receiver& only = *new Receiver;
  return only;
}

}  // namespace

void set_log_callback(LogCallback callback) {
  Receiver& to = receiver();
  verbatim::MutexLock lock(to.mutex);
  to.callback = std::move(callback);
}

void set_line_formatting(bool on) {
  g_formats.store(on, std::memory_order_relaxed);
}

void log_line_of_plugin(nccl::DebugLogLevel level, unsigned long flags, const char* file, int line, const char* format,
                        ...) {
  char text[kMaxLineBytes];
  va_list arguments;
  va_start(arguments, format);
  if (g_formats.load(std::memory_order_relaxed)) {
    std::vsnprintf(text, sizeof text, format, arguments);
  } else {
    std::snprintf(text, sizeof text, "%s", format);
  }
  va_end(arguments);
  Receiver& to = receiver();
  verbatim::MutexLock lock(to.mutex);
  if (to.callback) to.callback({level, flags, file == nullptr ? "" : file, line, text});
}

const char* log_level_name(nccl::DebugLogLevel level) {
  switch (level) {
    case nccl::DebugLogLevel::kNone:
      return "none";
    case nccl::DebugLogLevel::kVersion:
      return "version";
    case nccl::DebugLogLevel::kWarn:
      return "warning";
    case nccl::DebugLogLevel::kInfo:
      return "info";
    case nccl::DebugLogLevel::kAbort:
      return "abort";
    case nccl::DebugLogLevel::kTrace:
      return "trace";
  }
  return "?";
}

const char* result_name(nccl::Result result) {
  switch (result) {
    case nccl::Result::kSuccess:
      return "success";
    case nccl::Result::kUnhandledCudaError:
      return "unhandled CUDA error";
    case nccl::Result::kSystemError:
      return "system error";
    case nccl::Result::kInternalError:
      return "internal error";
    case nccl::Result::kInvalidArgument:
      return "invalid argument";
    case nccl::Result::kInvalidUsage:
      return "invalid usage";
    case nccl::Result::kRemoteError:
      return "remote error";
    case nccl::Result::kInProgress:
      return "in progress";
    case nccl::Result::kTimeout:
      return "timeout";
  }
  return "unknown result";
}

}  // namespace netapi
