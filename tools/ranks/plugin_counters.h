// The counters of Verbatim itself (VERBATIM_STATS), to be compared with what the tool asked of the plugin.
#pragma once

#include <optional>
#include <string>

namespace verbatim::ranks {

class PluginCounters {
 public:
  // Call before the plugin is loaded. Sets VERBATIM_STATS to a file of this process, unless it is set already; then
  // that file is read.
  PluginCounters();
  PluginCounters(const PluginCounters&) = delete;
  PluginCounters& operator=(const PluginCounters&) = delete;
  ~PluginCounters();

  // Call after the plugin was unloaded. Returns what it wrote, or nothing when Verbatim was not the plugin.
  std::optional<std::string> text() const;

 private:
  std::string path_;
  bool own_ = false;
};

}  // namespace verbatim::ranks
