// The parts of a JSON report that are not one tool's own.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "netapi/plugin.h"

namespace verbatim::ranks {

using Json = nlohmann::ordered_json;

Json json_of(const netapi::Properties& device);
// Throws Failure, of wrong usage, when there is no place for such a file: before the work, not behind it.
void check_writable(const std::string& path);
// Throws Failure when the file cannot be written.
void write_json(const Json& json, const std::string& path);

}  // namespace verbatim::ranks
