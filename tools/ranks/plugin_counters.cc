#include "ranks/plugin_counters.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "ranks/token.h"

namespace verbatim::ranks {
namespace {

constexpr const char* kVariable = "VERBATIM_STATS";

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += by.size()) {
    text.replace(at, what.size(), by);
  }
  return text;
}

}  // namespace

PluginCounters::PluginCounters() {
  if (const char* const given = std::getenv(kVariable); given != nullptr && *given != '\0') {
    char host[256] = {};
    ::gethostname(host, sizeof host - 1);
    path_ = replaced(replaced(given, "%p", std::to_string(::getpid())), "%h", host);
    return;
  }
  own_ = true;
  path_ = std::filesystem::temp_directory_path() /
          ("verbatim-stats-" + std::to_string(random_number()) + "-" + std::to_string(::getpid()) + ".json");
  ::setenv(kVariable, path_.c_str(), 1);
}

PluginCounters::~PluginCounters() {
  if (own_) ::unlink(path_.c_str());
}

std::optional<std::string> PluginCounters::text() const {
  const std::ifstream file(path_);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace verbatim::ranks
