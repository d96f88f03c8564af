// Keeps what the plugin says, for the moment when it fails.
#pragma once

#include <string>

namespace verbatim::ranks {

// From now on the plugin's lines come here; with `print` all of them also go to stderr at once.
void keep_plugin_log(int rank, bool print);
// The plugin's last warnings, each on a line of its own that begins with a line break; empty when there are none.
std::string plugin_warnings();

}  // namespace verbatim::ranks
