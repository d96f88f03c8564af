// The names of the devices, read with verbs from the library that the plugin opens.
#pragma once

#include <string>
#include <vector>

namespace conformance {

std::vector<std::string> verbs_device_names();

}  // namespace conformance
