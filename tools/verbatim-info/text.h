// The report of verbatim-info for people.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace verbatim::info {

// Everything that the JSON object has, so that the two cannot differ.
std::string to_text(const nlohmann::ordered_json& report);

}  // namespace verbatim::info
