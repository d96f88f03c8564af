// Keeps the last warnings of the plugin, for the message at the end of the run.
#pragma once

#include <string>
#include <string_view>

namespace verbatim::ranks {

// Sets the log callback of this process. With `print` all lines also go to stderr at once.
void keep_plugin_log(int rank, bool print);
// To be called before init of a plugin, with its name. The lines of foreign plugins are formatted only if they are
// printed: some pass arguments that do not match their format. Otherwise the format itself is kept.
void choose_log_formatting(std::string_view plugin);
// The last warnings of the plugin. Each starts with a line break. Empty when there are none.
std::string plugin_warnings();
// The same without those that were printed before or are not formatted.
std::string unprinted_plugin_warnings();

}  // namespace verbatim::ranks
