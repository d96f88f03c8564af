#include "ranks/plugin_log.h"

#include <cstdio>
#include <deque>
#include <string_view>

#include "base/mutex.h"
#include "netapi/log.h"

namespace verbatim::ranks {
namespace {

constexpr std::size_t kStoredWarnings = 10;

struct StoredLines {
  Mutex mutex;
  std::deque<std::string> warnings VERBATIM_GUARDED_BY(mutex);
};

// Never destroyed: a plugin may log while the process exits.
StoredLines& stored() {
  static StoredLines& only = *new StoredLines;
  return only;
}

bool g_prints = false;
bool g_formats = true;

}  // namespace

void choose_log_formatting(std::string_view plugin) {
  g_formats = g_prints || plugin == "Verbatim";
  netapi::set_line_formatting(g_formats);
}

void keep_plugin_log(int rank, bool print) {
  g_prints = print;
  netapi::set_log_callback([rank, print](const netapi::LogLine& line) {
    if (print) {
      std::fprintf(stderr, "rank %d plugin %s: %s\n", rank, netapi::log_level_name(line.level), line.text.c_str());
    }
    if (line.level != nccl::DebugLogLevel::kWarn) return;
    MutexLock lock(stored().mutex);
    stored().warnings.push_back(line.text);
    if (stored().warnings.size() > kStoredWarnings) stored().warnings.pop_front();
  });
}

std::string plugin_warnings() {
  MutexLock lock(stored().mutex);
  std::string text;
  for (const std::string& warning : stored().warnings) text += "\n  plugin: " + warning;
  return text;
}

std::string unprinted_plugin_warnings() {
  return g_prints || !g_formats ? "" : plugin_warnings();
}

}  // namespace verbatim::ranks
