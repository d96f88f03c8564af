// Keeps the last warnings of the plugin, for the message when the run fails.
#pragma once

#include <string>

namespace verbatim::ranks {

// Sets the log callback of this process. With `print` all lines also go to stderr at once.
void keep_plugin_log(int rank, bool print);
// The last warnings of the plugin. Each starts with a line break. Empty when there are none.
std::string plugin_warnings();

}  // namespace verbatim::ranks
