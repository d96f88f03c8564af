// The parts of a JSON report that several tools have in common.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "netapi/plugin.h"

namespace verbatim::ranks {

using Json = nlohmann::ordered_json;

Json json_of(const netapi::Properties& device);
// Throws Failure (kUsage) when write_json() cannot write `path`: it is a directory or a read-only file, or it does not
// exist and no file can be created in its directory. The tools call this before the run, so that they do not find out
// only when they have results to write.
void check_writable(const std::string& path);
// Incremented when the meaning of a field of a tool's JSON changes, or a field is removed.
inline constexpr unsigned kJsonSchema = 2;
// The object, or each object of the list, with the number as its first field `schema`.
Json with_schema(const Json& json);
// Writes with_schema(json). Throws Failure when the file cannot be written.
void write_json(const Json& json, const std::string& path);

}  // namespace verbatim::ranks
