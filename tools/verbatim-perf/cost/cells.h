// The figures of one subject, as its measuring processes leave them and the report reads them.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

namespace verbatim::perf::cost {

using Json = nlohmann::ordered_json;

// What is measured of a subject, each part in a process of its own.
constexpr const char* kInstructionsPart = "instructions";  // under callgrind
constexpr const char* kVerbsPart = "verbs";
constexpr const char* kMemoryPart = "memory";  // under the library that counts allocations

// Labels of callgrind's dumps: one of these, for a cell its bytes and group, and at last what to divide by.
constexpr const char* kWholeCell = "whole";
constexpr const char* kTestIncomplete = "test_incomplete";
constexpr const char* kSendWithoutReceive = "send_without_receive";
constexpr const char* kConnect = "connect";

// Instructions, divided.
struct Instructions {
  double plugin = 0;  // of the plugin's own object
  double libc = 0;    // of the C library and what it calls, on behalf of the plugin
  double verbs = 0;   // of softverbs' own object
};

// Every dump `prefix`.1, `prefix`.2, ... by its label without the divisor; those with the same are added up.
// `plugin_object`: the plugin's file as the loader names it. Throws Failure when a file is not what callgrind writes.
std::map<std::string, Instructions> read_dumps(const std::string& prefix, const std::string& plugin_object);

}  // namespace verbatim::perf::cost
