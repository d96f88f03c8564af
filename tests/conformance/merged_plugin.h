// The suite over merged devices. With CONFORMANCE_MERGE=S:R in the environment the plugin is seen through MergedPlugin:
// its devices are virtual ones, which are made after each init. connect uses the virtual device of S physical devices,
// from the first device on; listen that of R, from the last device on. So both ends have other devices, in another
// order. CONFORMANCE_MERGE=N: both ends have the same virtual device of N physical devices.
#pragma once

#include <string>

#include "netapi/plugin.h"

namespace conformance {

// netapi::open_plugin with the environment's CONFORMANCE_MERGE.
netapi::Opened open_plugin(const std::string& path, int version);

// Members of the device that connect uses, and physical devices for each device. 1 without CONFORMANCE_MERGE.
int merged_members();
int physical_per_device();

}  // namespace conformance
