// The parts of a JSON report that several tools have in common.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "netapi/plugin.h"

namespace verbatim::ranks {

using Json = nlohmann::ordered_json;

Json json_of(const netapi::Properties& device);
// Throws Failure (kUsage) when the file could not be written. Called before the run, so that no result is lost.
void check_writable(const std::string& path);
// Throws Failure when the file cannot be written.
void write_json(const Json& json, const std::string& path);

}  // namespace verbatim::ranks
