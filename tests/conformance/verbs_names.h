// The names that verbs gives to the devices here, straight from the library that the plugin opens.
#pragma once

#include <string>
#include <vector>

namespace conformance {

std::vector<std::string> verbs_device_names();

}  // namespace conformance
